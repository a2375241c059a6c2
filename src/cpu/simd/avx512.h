#pragma once

// AVX-512 F, BW, DQ, VL (x86-64-v4).

#include <immintrin.h>

#include "cpu/simd/vector.h"

namespace flash_attention::cpu {
namespace {

/// Masked forms with every lane on: with the plain ones GCC 12 warns of a variable in its own header.
constexpr __mmask16 all_lanes = 0xffff;

/// The larger; y if either is NaN.
FLASH_ATTENTION_INLINE Vec max(Vec x, Vec y) { return (Vec)_mm512_maskz_max_ps(all_lanes, (__m512)x, (__m512)y); }
FLASH_ATTENTION_INLINE Vec min(Vec x, Vec y) { return (Vec)_mm512_maskz_min_ps(all_lanes, (__m512)x, (__m512)y); }

/// a * b + sum, rounded once.
FLASH_ATTENTION_INLINE Vec fma(Vec a, Vec b, Vec sum) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }

FLASH_ATTENTION_INLINE Vec bounded_for_exp2(Vec x) { return x; }

FLASH_ATTENTION_INLINE Vec round_to_integer(Vec x) { return (Vec)_mm512_maskz_roundscale_ps(all_lanes, (__m512)x, 0x08); }

/// mantissa * 2^exponent; 0 if x < -126, so that no subnormal slows the products.
FLASH_ATTENTION_INLINE Vec scale_by_power(Vec mantissa, Vec exponent, Vec x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)mantissa, (__m512)exponent);
}

FLASH_ATTENTION_INLINE Vec float16_to_float(Short half) { return (Vec)_mm512_maskz_cvtph_ps(all_lanes, (__m256i)half); }
FLASH_ATTENTION_INLINE Short float_to_float16(Vec x) {
  return (Short)_mm512_maskz_cvtps_ph(all_lanes, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/// Four floats, in every four lanes of the vector.
FLASH_ATTENTION_INLINE Vec load_quad(const float* from) {
  return (Vec)_mm512_maskz_broadcast_f32x4(all_lanes, _mm_loadu_ps(from));
}

/// A mask of the first `count` < vector_lanes elements.
FLASH_ATTENTION_INLINE __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count > 0 ? (1u << count) - 1 : 0);
}
FLASH_ATTENTION_INLINE Vec load_first(const float* from, int count) {
  return (Vec)_mm512_maskz_loadu_ps(first_lanes(count), from);
}
FLASH_ATTENTION_INLINE Short load_first(const std::uint16_t* from, int count) {
  return (Short)_mm256_maskz_loadu_epi16(first_lanes(count), from);
}
FLASH_ATTENTION_INLINE void store_first(float* to, Vec x, int count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)x);
}
FLASH_ATTENTION_INLINE void store_first(std::uint16_t* to, Short x, int count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)x);
}

/// By way of a float16 of 2^-8 times the value. It may be subnormal, which costs nothing here.
FLASH_ATTENTION_INLINE Vec e4m3_to_float(Bytes codes) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)codes), 7) & _mm256_set1_epi16(0xbf80 - 0x10000);
  const __mmask16 nan = _mm_cmpeq_epi8_mask((__m128i)(codes | 0x80), _mm_set1_epi8(-1));
  const Vec x = (Vec)_mm512_maskz_cvtph_ps(all_lanes, halves) * 256.0f;
  return (Vec)_mm512_mask_mov_ps((__m512)x, nan, _mm512_set1_ps(__builtin_nanf("")));
}
FLASH_ATTENTION_INLINE Vec int8_to_float(Bytes codes) {
  return (Vec)_mm512_maskz_cvtepi32_ps(all_lanes, _mm512_maskz_cvtepi8_epi32(all_lanes, (__m128i)codes));
}

/// Bit i: whether byte i of 32 is not 0.
FLASH_ATTENTION_INLINE std::uint32_t nonzero_bytes(const std::uint8_t* from) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm256_test_epi8_mask(bytes, bytes);
}

}  // namespace
}  // namespace flash_attention::cpu
