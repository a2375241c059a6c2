#pragma once

// The operations for instruction sets that have no better: included by simd/<isa>.h after vector.h.

#include "cpu/simd/vector.h"

namespace flash_attention::cpu {
namespace {

/// x rounded to an integer; |x| < 2^22.
FLASH_ATTENTION_INLINE Vec round_to_integer(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: the sum has no bits below 1
  return (x + shift) - shift;
}

/// mantissa * 2^exponent for a mantissa near 1 and an integer exponent in [-126, 128]; 0 where x < -126.
FLASH_ATTENTION_INLINE Vec scale_by_power(Vec mantissa, Vec exponent, Vec x) {
  const Int shifted = (Int)mantissa + (__builtin_convertvector(exponent, Int) << 23);
  return select(x < -126.0f, Vec{}, (Vec)shifted);
}

}  // namespace
}  // namespace flash_attention::cpu
