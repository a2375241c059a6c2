#pragma once

// exp2 and tanh of a vector. docs/numerics.md states their errors; tests/cpu/math_test.cpp measures them.

#ifndef FLASH_ATTENTION_UNROLL
#error "include cpu/simd/<isa>.h first"
#endif

namespace flash_attention::cpu {
namespace {

/// 2^x: 2^round(x) times a polynomial on [-1/2, 1/2], the relative minimax one of degree 5 with value 1 at 0.
/// 0 below -126, Inf from 128 on, NaN for NaN.
FLASH_ATTENTION_INLINE Vec exp2(Vec x) {
  x = bounded_for_exp2(x);
  const Vec exponent = round_to_integer(x);
  const Vec f = x - exponent;
  Vec mantissa = splat(0x1.5bba14p-10f);
  mantissa = mantissa * f + 0x1.3cea88p-7f;
  mantissa = mantissa * f + 0x1.c6b752p-5f;
  mantissa = mantissa * f + 0x1.ebf9bcp-3f;
  mantissa = mantissa * f + 0x1.62e42ap-1f;
  mantissa = mantissa * f + 1.0f;
  return scale_by_power(mantissa, exponent, x);
}

/// Near 0, where 1 - 2 / (exp(2x) + 1) would cancel, an odd Taylor polynomial; elsewhere that expression.
FLASH_ATTENTION_INLINE Vec tanh(Vec x) {
  const Vec magnitude = absolute(x);
  const Vec far = 1.0f - 2.0f / (exp2(magnitude * (2 * log2_e)) + 1.0f);
  const Vec square = x * x;
  Vec near = splat(-1382.0f / 155925.0f);
  near = near * square + 62.0f / 2835.0f;
  near = near * square - 17.0f / 315.0f;
  near = near * square + 2.0f / 15.0f;
  near = near * square - 1.0f / 3.0f;
  near = near * square * magnitude + magnitude;
  const Vec result = select(magnitude < 0.4f, near, far);
  return (Vec)((Uint)result | ((Uint)x & 0x80000000u));
}

/// A bias or a program's score in units of log2(e). Finite numbers stay finite.
FLASH_ATTENTION_INLINE Vec scaled_bias(Vec bias) {
  constexpr float largest = 2.3e38f;
  const Vec bounded = select(bias < -largest, splat(-largest), select(bias > largest, splat(largest), bias));
  return select(absolute(bias) == infinity, bias, bounded) * log2_e;
}

/// 2^x of one number, for work that is done once a row.
inline float exp2_one(float x) { return exp2(splat(x))[0]; }

}  // namespace
}  // namespace flash_attention::cpu
