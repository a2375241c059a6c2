#pragma once

// AVX512-BF16: sums of products of pairs.

#include "cpu/simd/avx512.h"

namespace flash_attention::cpu {
namespace {

/// sum + a.low * b.low + a.high * b.high in every lane.
FLASH_ATTENTION_INLINE Vec dot_pairs(Vec sum, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

FLASH_ATTENTION_INLINE Short round_to_bfloat16(Vec x) { return (Short)_mm512_cvtneps_pbh((__m512)x); }

/// Each lane's two values rounded to bfloat16, the first in the low half of a 32-bit word.
FLASH_ATTENTION_INLINE Vec round_to_pair(Vec low, Vec high) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);  // 16 of low, then 16 of high
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Vec)_mm512_maskz_permutexvar_epi16(0xffffffff, order, halves);
}

/// Words of two rows of 32 halves, row 0 in the low halves: of the first 16 columns, and of the others.
FLASH_ATTENTION_INLINE void interleave_rows(Vec row0, Vec row1, Vec& first, Vec& second) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i other = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                         21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  first = (Vec)_mm512_permutex2var_epi16((__m512i)row0, order, (__m512i)row1);
  second = (Vec)_mm512_permutex2var_epi16((__m512i)row0, other, (__m512i)row1);
}

/// Float8 as bfloat16, `shift` and `bias` those of its normal codes: the bits moved, the exponent put right. Subnormal
/// codes, Inf and NaN, which are the `odd_count` lowest and those from `odd_end` on, come from a table by their low bits.
/// (A branch around the table takes twice as long where every third vector has such a code.)
template <int shift, int bias, int odd_count, int odd_end>
FLASH_ATTENTION_INLINE __m512i float8_to_bfloat16(__m256i codes, __m512i table) {
  constexpr __mmask32 all = 0xffffffffu;
  const __m512i words = _mm512_maskz_cvtepi8_epi16(all, codes);  // the sign in all upper bits
  const __m512i moved =
      _mm512_maskz_slli_epi16(all, words, shift) & _mm512_set1_epi16(static_cast<short>(0x8000 | 0x7f << shift));
  const __m512i normal = _mm512_maskz_add_epi16(all, moved, _mm512_set1_epi16(bias));
  const __m256i magnitude = codes & _mm256_set1_epi8(0x7f);
  const __mmask32 odd = _mm256_cmpge_epu8_mask(_mm256_sub_epi8(magnitude, _mm256_set1_epi8(odd_count)),
                                               _mm256_set1_epi8(odd_end - odd_count));
  const __m512i sign = words & _mm512_set1_epi16(static_cast<short>(0x8000));
  return _mm512_mask_mov_epi16(normal, odd, _mm512_maskz_permutexvar_epi16(odd, words, table) | sign);
}

/// Rows of codes as rows of bfloat16, columns in multiples of 32. code: Element::e4m3, e5m2 or int8 as a number (call.h
/// comes later).
template <int code>
inline void rows_to_bfloat16(const std::uint8_t* from, std::int64_t stride, int rows, int columns, std::uint16_t* to) {
  const __m512i e4m3 = _mm512_set_epi16(0x7fc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3c60,
                                        0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0);
  const __m512i e5m2 = _mm512_set_epi16(0x7fe0, 0x7fc0, 0x7fc0, 0x7f80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                        0, 0, 0, 0, 0, 0, 0, 0x3840, 0x3800, 0x3780, 0);
  for (int row = 0; row < rows; ++row, from += stride, to += columns) {
    for (int c = 0; c < columns; c += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + c));
      __m512i halves;
      if constexpr (code == 4) {
        halves = float8_to_bfloat16<4, 120 << 7, 8, 0x7f>(bytes, e4m3);
      } else if constexpr (code == 5) {
        halves = float8_to_bfloat16<5, 112 << 7, 4, 0x7c>(bytes, e5m2);
      } else {
        const auto half = [&](__m128i part) {
          return _mm512_maskz_cvtepi32_ps(all_lanes, _mm512_maskz_cvtepi8_epi32(all_lanes, part));
        };
        halves =
            (__m512i)_mm512_cvtne2ps_pbh(half(_mm256_extracti128_si256(bytes, 1)), half(_mm256_castsi256_si128(bytes)));
      }
      _mm512_storeu_si512(to + c, halves);
    }
  }
}

/// The same for a code that is known when it runs.
inline void codes_to_bfloat16(int code, const std::uint8_t* from, std::int64_t stride, int rows, int columns,
                              std::uint16_t* to) {
  if (code == 4) return rows_to_bfloat16<4>(from, stride, rows, columns, to);
  if (code == 5) return rows_to_bfloat16<5>(from, stride, rows, columns, to);
  rows_to_bfloat16<6>(from, stride, rows, columns, to);
}

}  // namespace
}  // namespace flash_attention::cpu
