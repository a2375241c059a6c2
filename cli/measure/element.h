#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "flash_attention/problem.h"

namespace flash_attention::cli {

inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline std::uint16_t to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0f)) return static_cast<std::uint16_t>(sign | (std::isnan(value) ? 0x7e00 : 0x7c00));
  if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(magnitude + 0.5f) - 0x3f000000u));
  }
  const std::uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + ((bits >> 13) & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

inline float from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const float fraction = static_cast<float>(bits & 0x3ff);
  float magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024.0f, exponent - 25);
  if (exponent == 31) magnitude = fraction != 0 ? NAN : INFINITY;
  return (bits & 0x8000) ? -magnitude : magnitude;
}

/// The value of an 8-bit code.
inline float from_code(Dtype dtype, std::uint8_t code) {
  if (dtype == Dtype::int8) return static_cast<std::int8_t>(code);
  if (dtype == Dtype::float8_e5m2) return from_float16(static_cast<std::uint16_t>(code << 8));
  const int exponent = (code >> 3) & 15, fraction = code & 7;
  if (exponent == 15 && fraction == 7) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

inline void store(void* data, Dtype dtype, std::int64_t index, float value) {
  if (dtype == Dtype::float32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] = dtype == Dtype::float16 ? to_float16(value) : to_bfloat16(value);
  }
}

}  // namespace flash_attention::cli
