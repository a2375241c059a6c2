#pragma once

// Keys and values of 8 and 4 bits: rows of codes are converted to another type. Scales are applied elsewhere, except in
// prefill, which works on floats, and except those of groups, which are part of the numbers of 4 bits.

#include "cpu/tile/rows.h"

namespace flash_attention::cpu {
namespace {

FLASH_ATTENTION_INLINE Vec e5m2_to_float(Bytes codes) {
  return float16_to_float(__builtin_convertvector(codes, Short) << 8);  // the upper half of a float16
}

/// Rows of codes as an element type; code: Dtype::float8_e4m3, e5m2 or int8.
template <Dtype code>
struct Codes : FloatProduct {
  using Stored = std::uint8_t;
  static FLASH_ATTENTION_INLINE Vec to_float(Bytes codes) {
    if constexpr (code == Dtype::float8_e4m3) return e4m3_to_float(codes);
    if constexpr (code == Dtype::float8_e5m2) return e5m2_to_float(codes);
    return int8_to_float(codes);
  }
  static FLASH_ATTENTION_INLINE Vec load(const Stored* from) { return to_float(cpu::load(from)); }
};

/// Calls use(Codes<code>{}) for 8-bit keys; false for others.
template <class Use>
FLASH_ATTENTION_INLINE bool with_codes(Dtype code, Use use) {
  if (code == Dtype::float8_e4m3) return use(Codes<Dtype::float8_e4m3>{}), true;
  if (code == Dtype::float8_e5m2) return use(Codes<Dtype::float8_e5m2>{}), true;
  if (code == Dtype::int8) return use(Codes<Dtype::int8>{}), true;
  return false;
}

/// The value of a code is a bfloat16, so nothing has to be rounded.
template <class T>
FLASH_ATTENTION_INLINE void store_codes(typename T::Stored* to, Vec x, int count) {
  if constexpr (__is_same(T, Bfloat16)) {
    const Short halves = __builtin_convertvector((Uint)x >> 16, Short);
    if (count >= vector_lanes) {
      store(to, halves);
    } else {
      store_first(to, halves, count);
    }
  } else {
    store_some<T>(to, x, count);
  }
}

/// Converts a row of codes to T. Writes exactly `columns` columns.
template <class T>
inline void convert_codes(Dtype code, const std::uint8_t* from, int columns, typename T::Stored* to) {
  int c = 0;
  if constexpr (only_bfloat16 && __is_same(T, Bfloat16)) {  // 32 at a time
    c = columns / 32 * 32;
    codes_to_bfloat16(code, from, 0, 1, c, to);
  }
  with_codes(code, [&](auto codes) {
    for (; c < columns; c += vector_lanes)
      store_codes<T>(to + c, load_some<decltype(codes)>(from + c, columns - c), columns - c);
  });
}

/// The values of the 16 codes of a group of 4 bits, as T.
template <class T>
struct GroupValues {
  alignas(64) typename T::Stored of_code[16];

  FLASH_ATTENTION_INLINE GroupValues(const Call& call, const GroupView& groups, std::int64_t group) {
    constexpr float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    constexpr float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    if (call.kv_dtype == Dtype::int4) {  // rounded once to the type of the queries
      with_element(call.dtype, [&](auto type) {
        using Element = decltype(type);
        using Stored = typename Element::Stored;
        const auto one = [&](const char* of) {
          return load_some<Element>(reinterpret_cast<const Stored*>(of) + group, 1)[0];
        };
        const Vec scale = splat(one(groups.scales)), zero = splat(one(groups.zeros));
        for (int c = 0; c < 16; c += vector_lanes)
          put(c, Element::to_float(Element::from_float(fma(cpu::load(numbers + c), scale, zero))));
      });
      return;
    }
    const auto* const byte = reinterpret_cast<const std::uint8_t*>(groups.scales) + group;
    const Vec scale = splat(call.kv_dtype == Dtype::nvfp4 ? load_some<Codes<Dtype::float8_e4m3>>(byte, 1)[0]
                                                          : power(*byte, call.dtype == Dtype::float16));
    with_element(call.dtype, [&](auto type) {  // rounds what float16 does not hold
      using Element = decltype(type);
      for (int c = 0; c < 16; c += vector_lanes)
        put(c, Element::to_float(Element::from_float(cpu::load(e2m1 + c) * scale)));
    });
  }

 private:
  FLASH_ATTENTION_INLINE void put(int c, Vec x) { store_some<T>(of_code + c, x, vector_lanes); }

  /// e8m0; `of_half`: clipped to what float16 holds.
  static FLASH_ATTENTION_INLINE float power(unsigned exponent, bool of_half) {
    if (of_half && exponent != 255) exponent = larger(103u, smaller(142u, exponent));
    const unsigned bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : exponent << 23;
    return __builtin_bit_cast(float, bits);
  }
};

/// A row of codes of 4 bits as T. first_group: of the row's groups.
template <class T>
inline void convert_groups(const Call& call, const GroupView& groups, std::int64_t first_group, const std::uint8_t* from,
                           int columns, typename T::Stored* to) {
  for (int begin = 0; begin < columns; begin += call.kv_group, ++first_group) {
    const GroupValues<T> values(call, groups, first_group);
    for (int c = begin; c < begin + call.kv_group; c += 2) {
      const unsigned both = from[c / 2];
      to[c] = values.of_code[both & 15u];
      to[c + 1] = values.of_code[both >> 4];
    }
  }
}

/// Converts the row of key j, from codes of any kind.
template <class T>
inline void convert_key(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t j, int columns,
                        typename T::Stored* to) {
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(block.key_row(call, tensor, j));
  if (call.kv_group == 0) return convert_codes<T>(call.kv_dtype, codes, columns, to);
  const GroupView& groups = &tensor == &call.k ? call.k_groups : call.v_groups;
  convert_groups<T>(call, groups, block.group_row(call, groups, j), codes, columns, to);
}

/// The scale of the block's key head; 1 if there is none, or if each row has its own.
FLASH_ATTENTION_INLINE float scale_of_head(const Call& call, const RowBlock& block, const ScaleView& scales) {
  if (scales.data == nullptr || call.token_scales) return 1;
  return scales.data[block.batch * scales.batch_stride + block.kv_head * scales.head_stride];
}
inline float scale_of_key(const Call& call, const RowBlock& block, const ScaleView& scales, std::int64_t j) {
  std::int64_t entry = call.cu_seqlens_kv != nullptr ? 0 : block.batch, row = block.sequence.kv_begin + j;
  if (call.page_table != nullptr) {
    entry = call.page_table[block.batch * call.page_table_stride + j / call.page_size];
    row = j % call.page_size;
  }
  return scales.data[entry * scales.batch_stride + row * scales.seq_stride + block.kv_head * scales.head_stride];
}

/// Rows [begin, begin + count) of codes as float, times their scales; `stride` floats from row to row, padded with 0.
inline void copy_scaled_codes(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t begin,
                              int count, int columns, float* to, int stride) {
  const ScaleView& scales = &tensor == &call.k ? call.k_scale : call.v_scale;
  for (int j = 0; j < count; ++j, to += stride) {
    convert_key<Float32>(call, block, tensor, begin + j, columns, to);
    const float scale =
        call.token_scales ? scale_of_key(call, block, scales, begin + j) : scale_of_head(call, block, scales);
    for (int c = 0; c < columns; ++c) to[c] *= scale;
    for (int c = columns; c < stride; ++c) to[c] = 0;
  }
}

}  // namespace
}  // namespace flash_attention::cpu
