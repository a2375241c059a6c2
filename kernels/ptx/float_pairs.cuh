#pragma once

// Two floats in one instruction, and the largest of three (PTX ISA 9.7.3, sm_100): the same results as one by one.

namespace flash_attention::ptx {

struct FloatPair {
  float x, y;
};

/// fma.rn.f32x2: a b + c.
__device__ __forceinline__ FloatPair fma_pair(FloatPair a, FloatPair b, FloatPair c) {
  FloatPair result;
  asm("{\n"
      ".reg .b64 a, b, c;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mov.b64 c, {%6, %7};\n"
      "fma.rn.f32x2 a, a, b, c;\n"
      "mov.b64 {%0, %1}, a;\n"
      "}"
      : "=f"(result.x), "=f"(result.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
  return result;
}

/// add.rn.f32x2.
__device__ __forceinline__ FloatPair add_pair(FloatPair a, FloatPair b) {
  FloatPair result;
  asm("{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "add.rn.f32x2 a, a, b;\n"
      "mov.b64 {%0, %1}, a;\n"
      "}"
      : "=f"(result.x), "=f"(result.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return result;
}

/// max of three: NaN is left out.
__device__ __forceinline__ float max3(float x, float y, float z) {
  float result;
  asm("max.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
}

}  // namespace flash_attention::ptx
