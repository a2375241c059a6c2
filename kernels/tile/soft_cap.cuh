#pragma once

// Soft cap with two instructions of the special function unit and no division, for kernels of 16-bit types.

#include "ptx/math.cuh"
#include "tile/math.cuh"

namespace flash_attention::tile {

/// The soft cap of one score, by w = 1 - tanh(x) = 2 / (1 + e^2x) with x = scale dot / cap: it is cap - cap w. The
/// error of 1e-7 cap is small compared with that of a 16-bit dot product.
struct SoftCapped {
  float shortfall;  // w

  __device__ __forceinline__ SoftCapped(float dot, float scale, float cap) {
    const float rate = 2.0f * log2_e * scale * ptx::reciprocal(cap);  // the same for all scores: computed once
    shortfall = ptx::reciprocal(0.5f + ptx::exp2(ptx::fma(dot, rate, -1.0f)));
  }

  /// d cap tanh(x) / d (cap x).
  __device__ __forceinline__ float slope() const {
    const float tanh = 1.0f - shortfall;
    return ptx::fma(-tanh, tanh, 1.0f);
  }
};

/// tanh(x) of a score, if |x| is at most 1/4, to 4e-7 of it: with FMAs only.
struct SmallTanh {
  float factors[3];  // of the powers of dot^2, times dot

  __device__ __forceinline__ SmallTanh(float scale, float cap) {
    constexpr float p[3] = {0.99999960f, -0.33321908f, 0.12841613f};
    const float to_x = scale * ptx::reciprocal(cap);
    float power = to_x;
#pragma unroll
    for (int t = 0; t < 3; ++t, power *= to_x * to_x) factors[t] = p[t] * power;
  }
  __device__ __forceinline__ float operator()(float dot) const {
    const float square = dot * dot;
    const float upper = ptx::fma(factors[2], square, factors[1]);
    return dot * ptx::fma(upper, square, factors[0]);
  }
};

/// The largest magnitude of a thread's scores. Magnitudes are ordered as their bits, and integers are compared three at
/// a time.
/// a time.
template <int count>
__device__ __forceinline__ float largest_magnitude(const float (&S)[count]) {
  int largest[4] = {};  // four chains of comparisons
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const int first = __builtin_bit_cast(int, ptx::max(ptx::abs(S[i]), ptx::abs(S[i + 1])));
    const int second = __builtin_bit_cast(int, ptx::max(ptx::abs(S[i + 2]), ptx::abs(S[i + 3])));
    largest[i / 4 % 4] = tile::max(tile::max(first, second), largest[i / 4 % 4]);
  }
  const int of_all = tile::max(tile::max(largest[0], largest[1]), tile::max(largest[2], largest[3]));
  return __builtin_bit_cast(float, of_all);
}

}  // namespace flash_attention::tile
