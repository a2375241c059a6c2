#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "support/half.h"

// Elements of 16 and 8 bits from float: to nearest, ties to even. The 8-bit types are clipped to their finite range
// (docs/numerics.md).

namespace flash_attention::support {

inline std::uint16_t bf16_of_float(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/// A number as a float of `mantissa` bits and that exponent bias. Numbers above `largest` become `largest`.
template <int mantissa, int bias>
inline std::uint32_t small_float(float value, float largest) {
  const float magnitude = std::fabs(value);
  const float clipped = magnitude < largest ? magnitude : largest;
  constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(128 - bias) << 23;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(clipped);
  if (bits < smallest_normal) {  // the sum with a number whose last place is that of the subnormal codes rounds to it
    constexpr std::uint32_t shift_bits = static_cast<std::uint32_t>(127 + 24 - mantissa - bias) << 23;
    return std::bit_cast<std::uint32_t>(clipped + std::bit_cast<float>(shift_bits)) - shift_bits;
  }
  constexpr int shift = 23 - mantissa;
  const std::uint32_t rounded = bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1u);
  return (rounded >> shift) - (static_cast<std::uint32_t>(127 - bias) << mantissa);
}

inline std::uint32_t sign_of(float value) { return std::bit_cast<std::uint32_t>(value) >> 31; }

inline std::uint16_t fp16_of_float(float value) {
  if (std::isnan(value)) return 0x7e00;
  const std::uint32_t magnitude = std::fabs(value) < 65520.0f ? small_float<10, 15>(value, 65520.0f) : 0x7c00u;
  return static_cast<std::uint16_t>(sign_of(value) << 15 | magnitude);
}

constexpr float largest_e4m3 = 448, largest_e5m2 = 57344, largest_int8 = 127;

inline std::uint8_t e4m3_of_float(float value) {
  if (std::isnan(value)) return 0x7f;
  return static_cast<std::uint8_t>(sign_of(value) << 7 | small_float<3, 7>(value, largest_e4m3));
}

inline std::uint8_t e5m2_of_float(float value) {
  if (std::isnan(value)) return 0x7f;
  return static_cast<std::uint8_t>(sign_of(value) << 7 | small_float<2, 15>(value, largest_e5m2));
}

inline std::int8_t int8_of_float(float value) {
  if (std::isnan(value)) return 0;
  const float clipped = value < -largest_int8 ? -largest_int8 : value > largest_int8 ? largest_int8 : value;
  return static_cast<std::int8_t>(std::nearbyint(clipped));
}

inline float float_of_e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(0x7fc00000u);
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -value : value;
}
inline float float_of_e5m2(std::uint8_t code) { return float_of_fp16(static_cast<std::uint16_t>(code << 8)); }

}  // namespace flash_attention::support
