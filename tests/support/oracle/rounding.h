#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "flash_attention/problem.h"

namespace flash_attention::testing {

// 16-bit floats, written for the tests alone: bits to value, and value to the nearest bits (ties to even).

inline double from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline std::uint16_t to_bfloat16(double value) {
  const float nearest = static_cast<float>(value);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::isnan(nearest)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// 2 to that power, for exponents of normal numbers.
inline double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

inline double from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? fraction * 0x1p-24 : (1024 + fraction) * power_of_two(exponent - 25));
}

inline std::uint16_t to_float16(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  // Subnormal numbers share the exponent of the smallest normal one.
  const int exponent = magnitude < 0x1p-14 ? -14 : static_cast<int>(std::bit_cast<std::uint64_t>(magnitude) >> 52) - 1023;
  // The fraction as a count of last places; 2^52 leaves a sum no room for less than one, so adding it rounds to even. A
  // count that rounds up to 2048 carries into the exponent, as it should.
  const double count = magnitude * power_of_two(10 - exponent) + 0x1p52 - 0x1p52;
  return static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + static_cast<int>(count)));
}

/// The value nearest to x that the type can hold.
inline double round_to(Dtype dtype, double x) {
  switch (dtype) {
    case Dtype::float32:
      return static_cast<float>(x);
    case Dtype::float16:
      return from_float16(to_float16(x));
    case Dtype::bfloat16:
      return from_bfloat16(to_bfloat16(x));
    default:
      break;
  }
  return x;
}

/// Distance from 1 to the next value of the type.
inline double epsilon(Dtype dtype) {
  return dtype == Dtype::float32 ? 0x1p-23 : dtype == Dtype::float16 ? 0x1p-10 : 0x1p-7;
}

}  // namespace flash_attention::testing
