#pragma once

// How decode multiplies rows of float8 keys as floats, if AVX512-VBMI can look up the values of 64 codes: that takes
// two look-ups and four shuffles, while computing takes nine operations for 16 codes. The products and their order are
// those of FloatDots, so the bits are, too.

#include "cpu/decode/decode.h"
#include "cpu/isa/tables.h"

namespace flash_attention::cpu {
namespace {

template <Dtype code>
struct LookupDots : FloatDots<Codes<code>> {
  using Keys = Codes<code>;
  static constexpr int columns = 64, vectors = 4;
  static constexpr bool any_width = false;

  static bool takes(const Call& call) {
    return call.kv_dtype == code && call.head_dim % columns == 0 && call.head_dim_v % columns == 0;
  }

  static FLASH_ATTENTION_INLINE void load_row(const std::uint8_t* from, Vec (&to)[4]) {
    codes_to_floats<code>(_mm512_loadu_si512(from), to);
  }

  static void copy_words(const std::uint8_t* from, int head_dim, float* to) {
    for (int c = 0; c < head_dim; c += columns) {
      Vec values[4];
      load_row(from + c, values);
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < 4; ++v) store(to + c + v * vector_lanes, values[v]);
    }
  }

  static void add_values(int rows, const float* P, KeyRows<Keys> V, int keys, float* O, int width) {
    for (int column = 0; column < width; column += columns) {
      for_row_groups<4>(rows, [&]<int group>(int row) {
        add_strip<group>(P + row * block_kv, {V.data + column, V.stride}, keys, O + row * width + column, width);
      });
    }
  }

 private:
  /// 64 columns of some rows of O.
  template <int rows>
  static void add_strip(const float* P, KeyRows<Keys> V, int keys, float* O, int width) {
    Vec sum[rows][4];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < 4; ++v) sum[r][v] = load(O + r * width + v * vector_lanes);
    }
    for (int key = 0; key < keys; ++key, ++P, V.data += V.stride) {
      Vec values[4];
      load_row(V.data, values);
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) {
        const Vec weight = splat(P[r * block_kv]);
        FLASH_ATTENTION_UNROLL
        for (int v = 0; v < 4; ++v) sum[r][v] = fma(weight, values[v], sum[r][v]);
      }
    }
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < 4; ++v) store(O + r * width + v * vector_lanes, sum[r][v]);
    }
  }
};

/// float8 keys by look-up. Everything else is left to the object for AVX-512. That object never has more rows in a
/// block, or more keys in a tile, than this one has memory for.
inline void decode_by_lookup(const Call& call, std::int64_t item, void* memory) {
  if (LookupDots<Dtype::float8_e4m3>::takes(call)) return decode_with<LookupDots<Dtype::float8_e4m3>>(call, item, memory);
  if (LookupDots<Dtype::float8_e5m2>::takes(call)) return decode_with<LookupDots<Dtype::float8_e5m2>>(call, item, memory);
  avx512_table.decode[0].run(call, item, memory);
}

}  // namespace
}  // namespace flash_attention::cpu
