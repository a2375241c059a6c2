#pragma once

// Emulated: kernels/ptx/convert.cuh. Round to nearest even, bit for bit as cvt does.

#include "abi/config.h"

namespace flash_attention::ptx {

struct bfloat16 {
  unsigned short bits;
};
struct half {
  unsigned short bits;
};

template <abi::Type type>
struct ElementOf {
  using Type = float;
};
template <>
struct ElementOf<abi::Type::float16> {
  using Type = half;
};
template <>
struct ElementOf<abi::Type::bfloat16> {
  using Type = bfloat16;
};
template <abi::Type type>
using Element = typename ElementOf<type>::Type;

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) { return __builtin_bit_cast(float, static_cast<unsigned>(value.bits) << 16); }

inline float to_float(half value) {
  const unsigned sign = static_cast<unsigned>(value.bits & 0x8000u) << 16;
  const unsigned magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(unsigned, scaled));
}

template <typename T>
inline T from_float(float value) {
  return value;
}

template <>
inline bfloat16 from_float<bfloat16>(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline half from_float<half>(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<unsigned short>(sign | 0x7c00u)};  // rounds past the largest, 65504
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the end
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return {static_cast<unsigned short>(sign | (__builtin_bit_cast(unsigned, shifted) - 0x3f000000u))};
  }
  const unsigned rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<unsigned short>(sign | rounded >> 13)};
}

template <abi::Type type>
inline unsigned pack(float low, float high) {
  static_assert(type != abi::Type::float32, "only 16-bit elements are packed");
  ++emulator::thread->arithmetic->simple;
  return from_float<Element<type>>(low).bits | static_cast<unsigned>(from_float<Element<type>>(high).bits) << 16;
}

template <abi::Type type>
inline float unpack_low(unsigned pair) {
  return to_float(Element<type>{static_cast<unsigned short>(pair)});
}
template <abi::Type type>
inline float unpack_high(unsigned pair) {
  return to_float(Element<type>{static_cast<unsigned short>(pair >> 16)});
}

/// Ties away from zero.
inline unsigned to_tf32(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  if ((bits & 0x7fffffffu) >= 0x7f800000u) return bits;
  return (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace flash_attention::ptx
