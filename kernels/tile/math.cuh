#pragma once

#include "ptx/math.cuh"

namespace flash_attention::tile {

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float nan = __builtin_bit_cast(float, 0x7fffffffu);
constexpr float smallest = __builtin_bit_cast(float, 0x00800000u);  // of the normal numbers

/// One of two types.
template <bool first, typename First, typename Second>
struct Choice {
  using Kind = First;
};
template <typename First, typename Second>
struct Choice<false, First, Second> {
  using Kind = Second;
};
template <bool first, typename First, typename Second>
using Choose = typename Choice<first, First, Second>::Kind;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__device__ constexpr int min(int a, int b) { return a < b ? a : b; }
__device__ constexpr int max(int a, int b) { return a < b ? b : a; }

/// exp(x). A maximum must be subtracted before the call: there the subtraction is exact for close numbers.
__device__ __forceinline__ float exp(float x) { return ptx::exp2(x * log2_e); }
__device__ __forceinline__ float log(float x) { return ptx::log2(x) * ln_2; }

/// tanh(x) to a few units in the last place of 1. tanh.approx is not used: its error of 2^-11, times a soft cap of 50,
/// would be visible in the probabilities. `two_over(y)` is 2 / y, for y >= 1.
template <typename TwoOver>
__device__ __forceinline__ float tanh(float x, TwoOver two_over) {
  const float x2 = x * x;
  const float near_zero = x * (1.0f + x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315))));
  const float elsewhere = 1.0f - two_over(1.0f + exp(2.0f * x));
  return x2 < 0.04f ? near_zero : elsewhere;
}
__device__ __forceinline__ float tanh(float x) {
  return tanh(x, [](float y) { return 2.0f / y; });
}
/// The same. slope is its derivative as 4 e^2x / (1 + e^2x)^2, because far from 0 1 - tanh(x)^2 is only rounding error.
__device__ __forceinline__ float tanh(float x, float& slope) {
  const float exponential = exp(2.0f * (x > 20.0f ? 20.0f : x)), shortfall = 2.0f / (1.0f + exponential);
  slope = exponential * shortfall * shortfall;
  return tanh(x, [&](float) { return shortfall; });
}

}  // namespace flash_attention::tile
