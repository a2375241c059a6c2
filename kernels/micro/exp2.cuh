#pragma once

// How many exponentials can an SM compute in a cycle, and does it pay to compute some of them with FMA instructions? Each
// thread does micro_repeat times 16 of them, as softmax does: p = 2^(s c - m).

#include "abi/args.h"
#include "abi/micro.h"
#include "micro/clock.cuh"
#include "ptx/math.cuh"
#include "tile/math.cuh"

namespace flash_attention {

/// 2^x by a polynomial: the integer part goes to the exponent, the fraction in [-0.5, 0.5] through a polynomial of degree
/// 3, relative error 1e-4.
__device__ __forceinline__ float exp2_by_fma(float x) {
  const float clamped = ptx::max(x, -127.0f);
  const float rounded = clamped + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const float fraction = clamped - (rounded - 12582912.0f);
  const float power = ptx::fma(ptx::fma(ptx::fma(0.0555041f, fraction, 0.2402265f), fraction, 0.6931472f), fraction, 1.0f);
  return __builtin_bit_cast(float, __builtin_bit_cast(int, power) + (__builtin_bit_cast(int, rounded) << 23));
}

template <abi::MicroConfig config>
__device__ __forceinline__ void micro_exp2(const abi::AttentionArgs& args) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = -0.01f * static_cast<float>(threadIdx.x + i);
  const micro::Clock clock(args);
#pragma unroll 1
  for (int repeat = 0; repeat < abi::micro_repeat; ++repeat) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float x = ptx::fma(values[i], 0.5f, -1.0f);
      values[i] = i % 8 < config.polynomials ? exp2_by_fma(x) : ptx::exp2(x);
    }
  }
  clock.stop();
  micro::keep(args, values);
}

}  // namespace flash_attention
