#pragma once

#include "abi/config.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// The 8-bit element types of a cache: conversions to float and back. They use integer arithmetic, so they are the same
// on every architecture.

namespace flash_attention::tile {

using namespace abi;

struct e4m3 {
  unsigned char bits;
};
struct e5m2 {
  unsigned char bits;
};
struct int8 {
  signed char bits;
};

/// The C++ type of a cache's elements.
template <Type type>
struct StoredOf {
  using Kind = ptx::Element<type>;
};
template <>
struct StoredOf<Type::e4m3> {
  using Kind = e4m3;
};
template <>
struct StoredOf<Type::e5m2> {
  using Kind = e5m2;
};
template <>
struct StoredOf<Type::int8> {
  using Kind = int8;
};
/// A byte with two codes of 4 bits.
struct TwoCodes {
  unsigned char bits;
};
template <Type type>
requires(has_groups(type)) struct StoredOf<type> {
  using Kind = TwoCodes;
};
template <Type type>
using Stored = typename StoredOf<type>::Kind;

/// The largest finite code.
template <Type type>
constexpr float largest_code = type == Type::e4m3   ? 448.0f
                               : type == Type::e5m2 ? 57344.0f
                                                    : 127.0f;

/// Exact. A product corrects the bias of the exponent; it also makes normal numbers of those that are subnormal in 8
/// bits.
__device__ __forceinline__ float to_float(e4m3 value) {
  const unsigned magnitude = value.bits & 0x7fu, sign = static_cast<unsigned>(value.bits & 0x80u) << 24;
  const float scaled = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return __builtin_bit_cast(float, sign | (magnitude == 0x7fu ? 0x7fc00000u : __builtin_bit_cast(unsigned, scaled)));
}
/// e5m2 is the upper half of a float16.
__device__ __forceinline__ float to_float(e5m2 value) {
  return ptx::to_float(ptx::half{static_cast<unsigned short>(value.bits << 8)});
}
__device__ __forceinline__ float to_float(int8 value) { return static_cast<float>(value.bits); }
using ptx::to_float;

/// Rounds to nearest even, clipped to the finite range. NaN becomes 0x7f.
template <Type type, int mantissa, int bias>
__device__ __forceinline__ unsigned char to_float8(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value), sign = bits >> 24 & 0x80u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7f;
  const float clipped = __builtin_bit_cast(float, bits & 0x7fffffffu) < largest_code<type>
                            ? __builtin_bit_cast(float, bits & 0x7fffffffu)
                            : largest_code<type>;
  constexpr unsigned smallest_normal = static_cast<unsigned>(128 - bias) << 23;
  const unsigned magnitude = __builtin_bit_cast(unsigned, clipped);
  // the sum with a number whose last place is that of the subnormal codes rounds to it
  if (magnitude < smallest_normal) {
    constexpr unsigned shift_bits = static_cast<unsigned>(127 + 24 - mantissa - bias) << 23;
    const float sum = clipped + __builtin_bit_cast(float, shift_bits);
    return static_cast<unsigned char>(sign | (__builtin_bit_cast(unsigned, sum) - shift_bits));
  }
  constexpr int shift = 23 - mantissa;
  const unsigned rounded = magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1u);
  return static_cast<unsigned char>(sign | ((rounded >> shift) - (static_cast<unsigned>(127 - bias) << mantissa)));
}

/// The nearest element of the type. append writes it.
template <Type type>
__device__ __forceinline__ Stored<type> encode(float value) {
  if constexpr (type == Type::e4m3) {
    return {to_float8<type, 3, 7>(value)};
  } else if constexpr (type == Type::e5m2) {
    return {to_float8<type, 2, 15>(value)};
  } else if constexpr (type == Type::int8) {
    // The sum with 1.5 * 2^23 rounds to an integer, which is then in its low bits. For NaN they would be arbitrary.
    const float clipped = value >= -127.0f ? (value <= 127.0f ? value : 127.0f) : (value < -127.0f ? -127.0f : 0.0f);
    return {static_cast<signed char>(__builtin_bit_cast(unsigned, clipped + 12582912.0f) & 0xffu)};
  } else {
    return ptx::from_float<Stored<type>>(value);
  }
}

}  // namespace flash_attention::tile
