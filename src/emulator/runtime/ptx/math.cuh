#pragma once

// Emulated: kernels/ptx/math.cuh. The approximations are exact here; only flush-to-zero is kept.

namespace flash_attention::ptx {

inline float flush_subnormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

inline float exp2(float x) { return flush_subnormal(__builtin_exp2f(flush_subnormal(x))); }
inline float log2(float x) { return __builtin_log2f(x); }
inline float tanh_approx(float x) { return __builtin_tanhf(x); }
inline float reciprocal(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }
inline float fma(float x, float y, float z) {
  *emulator::thread->fma_flops += 2;
  return __builtin_fmaf(x, y, z);
}
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline float max_or_nan(float x, float y) { return x != x || y != y ? __builtin_nanf("") : __builtin_fmaxf(x, y); }
inline float min_or_nan(float x, float y) { return x != x || y != y ? __builtin_nanf("") : __builtin_fminf(x, y); }
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float sin(float x) { return __builtin_sinf(x); }
inline float cos(float x) { return __builtin_cosf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline unsigned multiply_high(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}

}  // namespace flash_attention::ptx
