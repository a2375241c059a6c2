#pragma once

// AVX2 with FMA and F16C (x86-64-v3).

#include <immintrin.h>

#include "cpu/simd/portable.h"

namespace flash_attention::cpu {
namespace {

/// The larger; y if either is NaN.
FLASH_ATTENTION_INLINE Vec max(Vec x, Vec y) { return (Vec)_mm256_max_ps((__m256)x, (__m256)y); }
FLASH_ATTENTION_INLINE Vec min(Vec x, Vec y) { return (Vec)_mm256_min_ps((__m256)x, (__m256)y); }

/// a * b + sum, rounded once.
FLASH_ATTENTION_INLINE Vec fma(Vec a, Vec b, Vec sum) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }

/// Four floats, in every four lanes of the vector.
FLASH_ATTENTION_INLINE Vec load_quad(const float* from) {
  return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
}

FLASH_ATTENTION_INLINE Vec bounded_for_exp2(Vec x) { return min(splat(128.0f), max(splat(-127.0f), x)); }

FLASH_ATTENTION_INLINE Vec float16_to_float(Short half) { return (Vec)_mm256_cvtph_ps((__m128i)half); }
FLASH_ATTENTION_INLINE Short float_to_float16(Vec x) {
  return (Short)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace flash_attention::cpu
