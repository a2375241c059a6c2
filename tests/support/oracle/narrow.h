#pragma once

#include <cmath>
#include <cstdint>

#include "flash_attention/problem.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {

// The 8-bit types of a cache, written for the tests alone: from their definition, and the nearest code by looking at all.

inline double from_code(Dtype dtype, std::uint8_t code) {
  if (dtype == Dtype::int8) return static_cast<std::int8_t>(code);
  if (dtype == Dtype::float8_e5m2) return from_float16(static_cast<std::uint16_t>(code << 8));
  const int exponent = (code >> 3) & 15, fraction = code & 7;
  const double sign = code & 0x80 ? -1 : 1;
  if (exponent == 15 && fraction == 7) return NAN;
  return sign * (exponent == 0 ? fraction * 0x1p-9 : (8 + fraction) * power_of_two(exponent - 10));
}

/// To nearest, of two the even one, at most the largest finite number; NaN is 0x7f, or 0 in int8.
inline std::uint8_t to_code(Dtype dtype, double value) {
  if (std::isnan(value)) return dtype == Dtype::int8 ? 0 : 0x7f;
  int best = 0;
  double distance = INFINITY;
  for (int code = 0; code < 256; ++code) {
    const double candidate = from_code(dtype, static_cast<std::uint8_t>(code));
    if (!std::isfinite(candidate) || (dtype == Dtype::int8 && code == 0x80)) continue;
    const double clipped = std::fmin(std::fmax(value, -1e9), 1e9), here = std::fabs(candidate - clipped);
    const bool same_sign = std::signbit(candidate) == std::signbit(value);
    if (here < distance || (here == distance && (candidate == 0 ? same_sign : code % 2 == 0))) best = code, distance = here;
  }
  return static_cast<std::uint8_t>(best);
}

inline double largest_code(Dtype dtype) {
  return dtype == Dtype::float8_e4m3 ? 448 : dtype == Dtype::float8_e5m2 ? 57344 : 127;
}

}  // namespace flash_attention::testing
