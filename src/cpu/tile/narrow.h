#pragma once

// Keys and values of 8 bits: rows of codes as rows of another type, exactly. Scales stay outside, but for prefill, which
// works on floats.

#include "cpu/tile/rows.h"

namespace flash_attention::cpu {
namespace {

using Bytes = std::uint8_t __attribute__((vector_size(vector_lanes)));
using BytesInMemory __attribute__((aligned(1), may_alias)) = Bytes;

FLASH_ATTENTION_INLINE Bytes load_bytes(const std::uint8_t* from, int count) {
  if (count >= vector_lanes) return *reinterpret_cast<const BytesInMemory*>(from);
  alignas(vector_lanes) std::uint8_t part[vector_lanes];
  for (int i = 0; i < vector_lanes; ++i) part[i] = i < count ? from[i] : 0;
  return *reinterpret_cast<const BytesInMemory*>(part);
}

/// Subnormal codes are small integers: no product with a subnormal float, which takes many times as long.
FLASH_ATTENTION_INLINE Vec e4m3_to_float(Bytes codes) {
  const Uint bits = __builtin_convertvector(codes, Uint), magnitude = bits & 0x7fu;
  const Vec subnormal = __builtin_convertvector((Int)magnitude, Vec) * 0x1p-9f;
  const Vec normal = (Vec)((magnitude << 20) + (120u << 23));
  const Vec finite = select((Int)magnitude < 8, subnormal, normal);
  const Uint nan = Uint{} + 0x7fc00000u;
  return (Vec)((Uint)select((Int)magnitude == 0x7f, (Vec)nan, finite) | (bits & 0x80u) << 24);
}

FLASH_ATTENTION_INLINE Vec e5m2_to_float(Bytes codes) {
  return float16_to_float(__builtin_convertvector(codes, Short) << 8);  // the upper half of a float16
}

/// 2^23 + 128 + code, less the rest: compilers extend signed bytes one by one.
FLASH_ATTENTION_INLINE Vec int8_to_float(Bytes codes) {
  const Uint fraction = __builtin_convertvector(codes ^ 0x80, Uint);
  return (Vec)(fraction | 0x4b000000u) - 8388736.0f;
}

/// What a code is worth is a bfloat16: nothing is left to round.
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

/// A row of codes as T. columns: of the row, and no more is written.
template <class T>
inline void convert_codes(Element code, const std::uint8_t* from, int columns, typename T::Stored* to) {
  int c = 0;
  if constexpr (only_bfloat16 && __is_same(T, Bfloat16)) {  // 32 at a time
    c = columns / 32 * 32;
    codes_to_bfloat16(static_cast<int>(code), from, 0, 1, c, to);
  }
  const auto convert = [&](auto to_float) {
    for (; c < columns; c += vector_lanes) store_codes<T>(to + c, to_float(load_bytes(from + c, columns - c)), columns - c);
  };
  if (code == Element::e4m3) convert([](Bytes codes) { return e4m3_to_float(codes); });
  if (code == Element::e5m2) convert([](Bytes codes) { return e5m2_to_float(codes); });
  if (code == Element::int8) convert([](Bytes codes) { return int8_to_float(codes); });
}

/// The scale of the block's key head; 1 if there is none, or each row has its own.
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
    convert_codes<Float32>(call.key_element, reinterpret_cast<std::uint8_t*>(block.key_row(call, tensor, begin + j)),
                           columns, to);
    const float scale =
        call.token_scales ? scale_of_key(call, block, scales, begin + j) : scale_of_head(call, block, scales);
    for (int c = 0; c < columns; ++c) to[c] *= scale;
    for (int c = columns; c < stride; ++c) to[c] = 0;
  }
}

}  // namespace
}  // namespace flash_attention::cpu
