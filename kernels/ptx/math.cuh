#pragma once

// Arithmetic that C++ has no operator for (PTX ISA 9.7.3 floating point, 9.7.1 integer).

namespace flash_attention::ptx {

/// ex2.approx.ftz: 2^x, 2 ulp; 0 for -inf, no branch.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// lg2.approx: log2(x); -inf for 0.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// rcp.approx.ftz: 1 / x, 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// fma.rn: x * y + z, rounded once.
__device__ __forceinline__ float fma(float x, float y, float z) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
}

/// mul.rn: x * y, rounded even if an addition follows with which the compiler would fuse it.
__device__ __forceinline__ float multiply(float x, float y) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

/// max: if one operand is NaN, the other one.
__device__ __forceinline__ float max(float x, float y) {
  float result;
  asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

/// min: if one operand is NaN, the other one.
__device__ __forceinline__ float min(float x, float y) {
  float result;
  asm("min.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

/// max.NaN, min.NaN (sm_80): NaN if an operand is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

/// abs.
__device__ __forceinline__ float abs(float x) {
  float result;
  asm("abs.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// From CUDA's own library: IEEE square root, sine and cosine to 2 ulp, rounding down.
__device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
__device__ __forceinline__ float sin(float x) { return ::sinf(x); }
__device__ __forceinline__ float cos(float x) { return ::cosf(x); }
__device__ __forceinline__ float floor(float x) { return ::floorf(x); }

}  // namespace flash_attention::ptx
