#pragma once

// Arm's Advanced SIMD (every AArch64).

#include <arm_neon.h>

#include "cpu/simd/portable.h"

namespace flash_attention::cpu {
namespace {

/// The larger; y if either is NaN.
FLASH_ATTENTION_INLINE Vec max(Vec x, Vec y) { return (Vec)vmaxnmq_f32((float32x4_t)x, (float32x4_t)y); }
FLASH_ATTENTION_INLINE Vec min(Vec x, Vec y) { return (Vec)vminnmq_f32((float32x4_t)x, (float32x4_t)y); }

/// a * b + sum, rounded once.
FLASH_ATTENTION_INLINE Vec fma(Vec a, Vec b, Vec sum) {
  return (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}

/// Four floats, in every four lanes of the vector.
FLASH_ATTENTION_INLINE Vec load_quad(const float* from) { return load(from); }

/// vmax and vmin propagate a NaN, vmaxnm and vminnm drop it.
FLASH_ATTENTION_INLINE Vec bounded_for_exp2(Vec x) {
  return (Vec)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(-127.0f)), vdupq_n_f32(128.0f));
}

FLASH_ATTENTION_INLINE Vec float16_to_float(Short half) { return (Vec)vcvt_f32_f16((float16x4_t)half); }
FLASH_ATTENTION_INLINE Short float_to_float16(Vec x) { return (Short)vcvt_f16_f32((float32x4_t)x); }

}  // namespace
}  // namespace flash_attention::cpu
