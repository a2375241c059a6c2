#pragma once

// Emulated: kernels/ptx/pairs.cuh.

#include "ptx/convert.cuh"

namespace flash_attention::ptx {

inline unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> ((selector >> 4 * i & 7u) * 8) & 0xffu) << 8 * i;
  return result;
}

inline unsigned short upper_half(unsigned pair) { return static_cast<unsigned short>(pair >> 16); }

inline unsigned e4m3_to_half_pair(unsigned short pair) {
  unsigned result = 0;
  for (int i = 0; i < 2; ++i) {
    const unsigned code = pair >> 8 * i & 0xffu, magnitude = code & 0x7fu;
    const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                      : __builtin_bit_cast(float, (magnitude << 20) + (120u << 23));
    // The GPU's NaN has no sign (seen on an H200).
    const unsigned bits = magnitude == 0x7fu ? 0x7fffu : from_float<half>(value).bits | (code & 0x80u) << 8;
    result |= bits << 16 * i;
  }
  return result;
}

inline unsigned to_e4m3(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value), sign = bits >> 24 & 0x80u;
  if (value != value) return 0x7fu;
  float magnitude = __builtin_bit_cast(float, bits & 0x7fffffffu);
  if (magnitude > 448.0f) magnitude = 448.0f;
  if (magnitude < 0x1p-6f) {  // subnormal: a sum with 2^14 leaves the code in its last bits
    return sign | (__builtin_bit_cast(unsigned, magnitude + 0x1p14f) & 0xfu);
  }
  const unsigned rounded = __builtin_bit_cast(unsigned, magnitude);
  return sign | (((rounded + 0x7ffffu + (rounded >> 20 & 1u)) >> 20) - (120u << 3));
}

inline unsigned short to_e4m3_pair(float low, float high) {
  return static_cast<unsigned short>(to_e4m3(low) | to_e4m3(high) << 8);
}

template <abi::Type type, class Of>
inline unsigned of_pairs(unsigned x, unsigned y, Of of) {
  return pack<type>(of(unpack_low<type>(x), unpack_low<type>(y)), of(unpack_high<type>(x), unpack_high<type>(y)));
}

template <abi::Type type>
inline unsigned multiply_pairs(unsigned x, unsigned y) {
  return of_pairs<type>(x, y, [](float a, float b) { return a * b; });
}

/// The float product is exact, and its sum is rounded to float before it is rounded to the type: twice, where float has
/// not room for both.
template <abi::Type type>
inline unsigned fma_pairs(unsigned x, unsigned y, unsigned z) {
  const unsigned products_low =
      __builtin_bit_cast(unsigned, __builtin_fmaf(unpack_low<type>(x), unpack_low<type>(y), unpack_low<type>(z)));
  const unsigned products_high =
      __builtin_bit_cast(unsigned, __builtin_fmaf(unpack_high<type>(x), unpack_high<type>(y), unpack_high<type>(z)));
  return pack<type>(__builtin_bit_cast(float, products_low), __builtin_bit_cast(float, products_high));
}

inline unsigned multiply_half_pairs(unsigned x, unsigned y) {
  return of_pairs<abi::Type::float16>(x, y, [](float a, float b) { return a * b; });
}

template <abi::Type type>
inline unsigned subtract_pairs(unsigned x, unsigned y) {
  return of_pairs<type>(x, y, [](float a, float b) { return a - b; });
}

}  // namespace flash_attention::ptx
