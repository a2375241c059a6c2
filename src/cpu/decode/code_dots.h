#pragma once

// How decode multiplies rows of 8-bit keys with AVX512-BF16. They are converted in registers, just before the products
// of PairDots; the result has the same bits.

#include "cpu/isa/tables.h"
#include "cpu/tile/dot_products.h"

namespace flash_attention::cpu {
namespace {

template <Dtype code>
struct CodeDots : PairDots {
  using Keys = Codes<code>;
  static constexpr int columns = 64, vectors = 2;
  static constexpr int max_rows = 4;  // more rows need K in memory (eight_rows.h)

  static bool takes(const Call& call) {
    return call.kv_dtype == code && call.head_dim % 64 == 0 && call.head_dim_v % 64 == 0 &&
           plan::cpu_decode_padded(call.group * call.seq_q) < 8;
  }

  static FLASH_ATTENTION_INLINE void load_row(const std::uint8_t* from, Vec (&to)[2]) {
    __m512i first, second;
    codes_to_halves<code>(_mm512_loadu_si512(from), first, second);
    to[0] = (Vec)first, to[1] = (Vec)second;
  }

  static void add_values(int rows, const float* P, KeyRows<Keys> V, int keys, float* O, int width) {
    for (int column = 0; column < width; column += 64) {
      add_columns<4>(rows, P, keys, O + column, width, Paired{V.data + column, V.stride});
    }
  }

 private:
  /// Words of a pair of keys.
  struct Paired {
    const std::uint8_t* data;
    std::int64_t stride;
    FLASH_ATTENTION_INLINE void load(int key, bool both, Vec (&pairs)[4]) const {
      const std::uint8_t* row = data + key * stride;
      codes_to_pairs<code>(_mm512_loadu_si512(row), both ? _mm512_loadu_si512(row + stride) : _mm512_setzero_si512(),
                           pairs);
    }
  };
};

/// Leaves rows that are no whole number of vectors of pairs to the object for AVX-512.
inline void decode_pairs(const Call& call, std::int64_t item, void* memory) {
  if (CodeDots<Dtype::float8_e4m3>::takes(call)) return decode_with<CodeDots<Dtype::float8_e4m3>>(call, item, memory);
  if (CodeDots<Dtype::float8_e5m2>::takes(call)) return decode_with<CodeDots<Dtype::float8_e5m2>>(call, item, memory);
  if (CodeDots<Dtype::int8>::takes(call)) return decode_with<CodeDots<Dtype::int8>>(call, item, memory);
  const bool fits = call.head_dim % PairDots::columns == 0 && call.head_dim_v % PairDots::columns == 0;
  fits ? decode_with<PairDots>(call, item, memory) : avx512_table.decode[0].run(call, item, memory);
}

}  // namespace
}  // namespace flash_attention::cpu
