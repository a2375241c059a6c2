#pragma once

// Emulated: kernels/ptx/float_pairs.cuh.

#include "ptx/math.cuh"

namespace flash_attention::ptx {

struct FloatPair {
  float x, y;
};

inline FloatPair fma_pair(FloatPair a, FloatPair b, FloatPair c) { return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)}; }
inline FloatPair add_pair(FloatPair a, FloatPair b) { return {a.x + b.x, a.y + b.y}; }
inline float max3(float x, float y, float z) { return max(max(x, y), z); }

}  // namespace flash_attention::ptx
