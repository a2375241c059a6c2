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

/// Rows of codes as rows of bfloat16, columns in multiples of 32. code: Element::e4m3, e5m2 or int8 as a number (call.h
/// comes later).
template <int code>
inline void rows_to_bfloat16(const std::uint8_t* from, std::int64_t stride, int rows, int columns, std::uint16_t* to) {
  constexpr __mmask32 all = 0xffffffffu;
  // e4m3: the bits moved, the bias put right; subnormal codes from a table.
  const __m512i low_bits = _mm512_set1_epi16(0x7f), bias = _mm512_set1_epi16(0x3c00), eight = _mm512_set1_epi16(8);
  const __m512i nan = _mm512_set1_epi16(0x7fc0), sign = _mm512_set1_epi16(static_cast<short>(0x8000));
  const __m512i subnormal = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3c60,
                                             0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0);
  for (int row = 0; row < rows; ++row, from += stride, to += columns) {
    for (int c = 0; c < columns; c += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + c));
      __m512i halves;
      if constexpr (code == 4) {
        const __m512i words = _mm512_maskz_cvtepu8_epi16(all, bytes), magnitude = words & low_bits;
        halves = _mm512_maskz_add_epi16(all, _mm512_maskz_slli_epi16(all, magnitude, 4), bias);
        halves = _mm512_mask_permutexvar_epi16(halves, _mm512_cmplt_epu16_mask(magnitude, eight), magnitude, subnormal);
        halves = _mm512_mask_mov_epi16(halves, _mm512_cmpeq_epi16_mask(magnitude, low_bits), nan);
        halves |= _mm512_maskz_slli_epi16(all, words, 8) & sign;
      } else {
        const auto half = [&](__m128i part) {
          if constexpr (code == 6) return _mm512_maskz_cvtepi32_ps(all_lanes, _mm512_maskz_cvtepi8_epi32(all_lanes, part));
          return _mm512_maskz_cvtph_ps(all_lanes, _mm256_slli_epi16(_mm256_cvtepu8_epi16(part), 8));
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
