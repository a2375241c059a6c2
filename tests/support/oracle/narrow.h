#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "flash_attention/problem.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {

// The 8-bit types of a cache, written for the tests alone: from their definition, and the nearest code by looking at its
// neighbours.

inline double from_code(Dtype dtype, std::uint8_t code) {
  if (dtype == Dtype::int8) return static_cast<std::int8_t>(code);
  if (dtype == Dtype::float8_e5m2) return from_float16(static_cast<std::uint16_t>(code << 8));
  const int exponent = (code >> 3) & 15, fraction = code & 7;
  const double sign = code & 0x80 ? -1 : 1;
  if (exponent == 15 && fraction == 7) return NAN;
  return sign * (exponent == 0 ? fraction * 0x1p-9 : (8 + fraction) * power_of_two(exponent - 10));
}

/// The finite numbers of the type with their codes, from the least; -128 is not used.
inline const std::vector<std::pair<double, int>>& finite_codes(Dtype dtype) {
  const auto sorted = [](Dtype of) {
    std::vector<std::pair<double, int>> all;
    for (int code = 0; code < 256; ++code) {
      const double value = from_code(of, static_cast<std::uint8_t>(code));
      if (std::isfinite(value) && !(of == Dtype::int8 && code == 0x80)) all.emplace_back(value, code);
    }
    std::sort(all.begin(), all.end());
    return all;
  };
  static const std::vector<std::pair<double, int>> e4m3 = sorted(Dtype::float8_e4m3), e5m2 = sorted(Dtype::float8_e5m2),
                                                   int8 = sorted(Dtype::int8);
  return dtype == Dtype::float8_e4m3 ? e4m3 : dtype == Dtype::float8_e5m2 ? e5m2 : int8;
}

/// To nearest, of two the even one, at most the largest finite number; NaN is 0x7f, or 0 in int8.
inline std::uint8_t to_code(Dtype dtype, double value) {
  if (std::isnan(value)) return dtype == Dtype::int8 ? 0 : 0x7f;
  const auto& all = finite_codes(dtype);
  const double clipped = std::clamp(value, -1e9, 1e9);
  const auto above = std::lower_bound(all.begin(), all.end(), clipped, [](const auto& x, double y) { return x.first < y; });
  int best = 0;
  double distance = INFINITY;
  // Two on either side: there are two zeros.
  for (auto it = above - std::min<std::ptrdiff_t>(2, above - all.begin()),
            end = above + std::min<std::ptrdiff_t>(2, all.end() - above);
       it != end; ++it) {
    const auto& [candidate, code] = *it;
    const double here = std::fabs(candidate - clipped);
    const bool same_sign = dtype == Dtype::int8 || std::signbit(candidate) == std::signbit(value);  // int8 has one zero
    if (here < distance || (here == distance && (candidate == 0 ? same_sign : code % 2 == 0))) best = code, distance = here;
  }
  return static_cast<std::uint8_t>(best);
}

/// What a code of 4 bits is worth: e2m1, or 0 to 15.
inline double from_nibble(Dtype dtype, int code) {
  if (dtype == Dtype::int4) return code;
  const int exponent = (code >> 1) & 3, fraction = code & 1;
  const double magnitude = exponent == 0 ? fraction * 0.5 : (2 + fraction) * power_of_two(exponent - 2);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

/// The nearest code of 4 bits, of two the even one.
inline int to_nibble(Dtype dtype, double value) {
  int best = 0;
  double distance = INFINITY;
  for (int code = 0; code < 16; ++code) {
    const double candidate = from_nibble(dtype, code), here = std::fabs(candidate - value);
    const bool same_sign = std::signbit(candidate) == std::signbit(value);
    if (here < distance || (here == distance && (candidate == 0 ? same_sign || dtype == Dtype::int4 : code % 2 == 0)))
      best = code, distance = here;
  }
  return best;
}

/// What the byte of a group's scale is worth: e4m3 (nvfp4) or a power of two (mxfp4).
inline double from_scale(Dtype dtype, std::uint8_t code) {
  if (dtype == Dtype::nvfp4) return from_code(Dtype::float8_e4m3, code);
  return code == 255 ? NAN : std::ldexp(1.0, code - 127);
}

/// What a code is worth in its group, in the type of the queries. `zero`: of int4.
inline double from_group(Dtype codes, Dtype dtype, int code, double scale, double zero) {
  const double value = from_nibble(codes, code) * scale;
  return codes == Dtype::int4 ? round_to(dtype, value + zero) : codes == Dtype::mxfp4 ? round_to(dtype, value) : value;
}

inline double largest_code(Dtype dtype) {
  return dtype == Dtype::float8_e4m3 ? 448 : dtype == Dtype::float8_e5m2 ? 57344 : 127;
}

}  // namespace flash_attention::testing
