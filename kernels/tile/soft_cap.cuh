#pragma once

// Soft cap with two instructions of the special function unit and no division, for kernels of 16-bit types.

#include "ptx/math.cuh"
#include "tile/math.cuh"

namespace flash_attention::tile {

/// cap tanh(x) of one score, x = scale dot / cap, by w = 1 - tanh(x) = 2 / (1 + e^2x): it is cap - cap w. The error of
/// 1e-7 cap is nothing compared with that of a 16-bit dot product.
struct SoftCapped {
  float shortfall;  // w

  __device__ __forceinline__ SoftCapped(float dot, float scale, float cap) {
    const float rate = 2.0f * log2_e * scale * ptx::reciprocal(cap);  // the same for all scores: worked out once
    shortfall = ptx::reciprocal(0.5f + ptx::exp2(ptx::fma(dot, rate, -1.0f)));
  }

  /// d cap tanh(x) / d (cap x).
  __device__ __forceinline__ float slope() const {
    const float tanh = 1.0f - shortfall;
    return ptx::fma(-tanh, tanh, 1.0f);
  }
};

}  // namespace flash_attention::tile
