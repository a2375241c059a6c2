#pragma once

// AVX512-BF16: sums of products of pairs.

#include "cpu/simd/avx512.h"
#include "flash_attention/dtype.h"

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

/// The values of a code's magnitudes in bfloat16, lower and upper bytes apart, as one instruction looks them up. The
/// magnitude of a float8 is the code without its sign, that of int8 its absolute value.
struct CodeTable {
  alignas(64) std::uint8_t high[128], low[128];
};

/// code: float8_e4m3, float8_e5m2 or int8.
template <Dtype code>
constexpr CodeTable make_code_table() {
  constexpr std::uint16_t e4m3_subnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  constexpr std::uint16_t e5m2_subnormal[4] = {0, 0x3780, 0x3800, 0x3840};
  constexpr std::uint16_t e5m2_nonfinite[4] = {0x7f80, 0x7fc0, 0x7fc0, 0x7fe0};
  CodeTable table{};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    int bits = 0;
    if (code == Dtype::float8_e4m3) {
      bits = magnitude < 8 ? e4m3_subnormal[magnitude] : (magnitude << 4) + (120 << 7);
      if (magnitude == 0x7f) bits = 0x7fc0;
    } else if (code == Dtype::float8_e5m2) {
      bits = magnitude < 4 ? e5m2_subnormal[magnitude] : (magnitude << 5) + (112 << 7);
      if (magnitude >= 0x7c) bits = e5m2_nonfinite[magnitude - 0x7c];
    } else {
      bits = static_cast<int>(__builtin_bit_cast(std::uint32_t, static_cast<float>(magnitude)) >> 16);
    }
    table.high[magnitude] = static_cast<std::uint8_t>(bits >> 8);
    table.low[magnitude] = static_cast<std::uint8_t>(bits);
  }
  return table;
}
template <Dtype code>
alignas(64) constexpr CodeTable code_table = make_code_table<code>();

/// Looks up the values of 64 codes in bfloat16, lower and upper bytes apart. AVX512-VBMI looks up 128 bytes at a time.
/// Nothing is computed, so subnormal codes and NaN cost the same.
template <Dtype code>
FLASH_ATTENTION_INLINE void look_up_codes(__m512i codes, __m512i& low, __m512i& high) {
  const auto look_up = [](const std::uint8_t(&table)[128], __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i magnitude =
      code == Dtype::int8 ? _mm512_maskz_abs_epi8(~__mmask64{0}, codes) : codes;  // its upper bit is ignored
  high = look_up(code_table<code>.high, magnitude) | (codes & sign);
  if constexpr (code == Dtype::int8)
    high =
        _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(codes, sign), _mm512_set1_epi8(static_cast<char>(0xc3)));  // -128
  low = look_up(code_table<code>.low, magnitude);
}

/// Converts 64 codes to bfloat16.
template <Dtype code>
FLASH_ATTENTION_INLINE void codes_to_halves(__m512i codes, __m512i& first, __m512i& second) {
  // Eight by eight, so that the two halves of a 16-byte lane belong to the first and to the second 32 codes.
  codes = _mm512_maskz_permutexvar_epi64(0xff, _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), codes);
  __m512i low, high;
  look_up_codes<code>(codes, low, high);
  first = _mm512_maskz_unpacklo_epi8(~__mmask64{0}, low, high);
  second = _mm512_maskz_unpackhi_epi8(~__mmask64{0}, low, high);
}

/// The bytes of 64 low halves (0 to 63) and 64 high halves (64 to 127) that form the floats of vector `v`, in their
/// upper bytes.
template <int v>
FLASH_ATTENTION_INLINE __m512i float_bytes() {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr int first = 16 * v << 16 | (64 + 16 * v) << 24;
  return (__m512i)((Int)lane * 0x01010000 + first);
}

/// Converts 64 codes to floats.
template <Dtype code>
FLASH_ATTENTION_INLINE void codes_to_floats(__m512i codes, Vec (&to)[4]) {
  constexpr __mmask64 upper = 0xccccccccccccccccu;  // bytes of the floats whose lower bytes are 0
  __m512i low, high;
  look_up_codes<code>(codes, low, high);
  to[0] = (Vec)_mm512_maskz_permutex2var_epi8(upper, low, float_bytes<0>(), high);
  to[1] = (Vec)_mm512_maskz_permutex2var_epi8(upper, low, float_bytes<1>(), high);
  to[2] = (Vec)_mm512_maskz_permutex2var_epi8(upper, low, float_bytes<2>(), high);
  to[3] = (Vec)_mm512_maskz_permutex2var_epi8(upper, low, float_bytes<3>(), high);
}

/// Two rows of 64 codes as words of bfloat16, the first row in the low halves, columns in order.
template <Dtype code>
FLASH_ATTENTION_INLINE void codes_to_pairs(__m512i row0, __m512i row1, Vec (&pairs)[4]) {
  // Four by four, so that each quarter of a 16-byte lane belongs to another vector of words.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  row0 = _mm512_maskz_permutexvar_epi32(all_lanes, order, row0);
  row1 = _mm512_maskz_permutexvar_epi32(all_lanes, order, row1);
  const __m512i codes[2] = {_mm512_maskz_unpacklo_epi8(~__mmask64{0}, row0, row1),
                            _mm512_maskz_unpackhi_epi8(~__mmask64{0}, row0, row1)};
  FLASH_ATTENTION_UNROLL
  for (int i = 0; i < 2; ++i) {
    __m512i low, high;
    look_up_codes<code>(codes[i], low, high);
    pairs[2 * i] = (Vec)_mm512_maskz_unpacklo_epi8(~__mmask64{0}, low, high);
    pairs[2 * i + 1] = (Vec)_mm512_maskz_unpackhi_epi8(~__mmask64{0}, low, high);
  }
}

/// Converts rows of codes to rows of bfloat16, columns in multiples of 32.
template <Dtype code>
inline void rows_to_bfloat16(const std::uint8_t* from, std::int64_t stride, int rows, int columns, std::uint16_t* to) {
  __m512i first, second;
  for (int row = 0; row < rows; ++row, from += stride, to += columns) {
    int c = 0;
    for (; c + 64 <= columns; c += 64) {
      codes_to_halves<code>(_mm512_loadu_si512(from + c), first, second);
      _mm512_storeu_si512(to + c, first);
      _mm512_storeu_si512(to + c + 32, second);
    }
    if (c < columns) {
      codes_to_halves<code>(_mm512_maskz_loadu_epi8(0xffffffff, from + c), first, second);
      _mm512_storeu_si512(to + c, first);
    }
  }
}

/// The same for a code that is known only at run time.
inline void codes_to_bfloat16(Dtype code, const std::uint8_t* from, std::int64_t stride, int rows, int columns,
                              std::uint16_t* to) {
  if (code == Dtype::float8_e4m3) return rows_to_bfloat16<Dtype::float8_e4m3>(from, stride, rows, columns, to);
  if (code == Dtype::float8_e5m2) return rows_to_bfloat16<Dtype::float8_e5m2>(from, stride, rows, columns, to);
  rows_to_bfloat16<Dtype::int8>(from, stride, rows, columns, to);
}

}  // namespace
}  // namespace flash_attention::cpu
