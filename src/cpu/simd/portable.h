#pragma once

// Operations for instruction sets without better ones. simd/<isa>.h includes this file after vector.h.

#include "cpu/simd/vector.h"

namespace flash_attention::cpu {
namespace {

/// x rounded to an integer; |x| < 2^22.
FLASH_ATTENTION_INLINE Vec round_to_integer(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: the sum has no bits below 1
  return (x + shift) - shift;
}

/// mantissa * 2^exponent for a mantissa near 1 and an integer exponent in [-126, 128]; 0 if x < -126.
FLASH_ATTENTION_INLINE Vec scale_by_power(Vec mantissa, Vec exponent, Vec x) {
  const Int shifted = (Int)mantissa + (__builtin_convertvector(exponent, Int) << 23);
  return select(x < -126.0f, Vec{}, (Vec)shifted);
}

/// The first `count` < vector_lanes elements, then 0. (Compilers turn a loop to `count` into a memcpy, and newer ones
/// warn of it.)
FLASH_ATTENTION_INLINE Vec load_first(const float* from, int count) {
  float part[vector_lanes];
  for (int i = 0; i < vector_lanes; ++i) part[i] = i < count ? from[i] : 0;
  return load(part);
}
FLASH_ATTENTION_INLINE Short load_first(const std::uint16_t* from, int count) {
  std::uint16_t part[vector_lanes];
  for (int i = 0; i < vector_lanes; ++i) part[i] = i < count ? from[i] : 0;
  return load(part);
}
FLASH_ATTENTION_INLINE void store_first(float* to, Vec x, int count) {
  for (int i = 0; i < count; ++i) to[i] = x[i];
}
FLASH_ATTENTION_INLINE void store_first(std::uint16_t* to, Short x, int count) {
  for (int i = 0; i < count; ++i) to[i] = x[i];
}

/// Treats subnormal codes as small integers: a product with a subnormal float would take many times as long.
FLASH_ATTENTION_INLINE Vec e4m3_to_float(Bytes codes) {
  const Uint bits = __builtin_convertvector(codes, Uint), magnitude = bits & 0x7fu;
  const Vec subnormal = __builtin_convertvector((Int)magnitude, Vec) * 0x1p-9f;
  const Vec normal = (Vec)((magnitude << 20) + (120u << 23));
  const Vec finite = select((Int)magnitude < 8, subnormal, normal);
  const Uint nan = Uint{} + 0x7fc00000u;
  return (Vec)((Uint)select((Int)magnitude == 0x7f, (Vec)nan, finite) | (bits & 0x80u) << 24);
}

/// 2^23 + 128 + code, minus 2^23 + 128: compilers extend signed bytes one by one.
FLASH_ATTENTION_INLINE Vec int8_to_float(Bytes codes) {
  const Uint fraction = __builtin_convertvector(codes ^ 0x80, Uint);
  return (Vec)(fraction | 0x4b000000u) - 8388736.0f;
}

/// Bit i: whether byte i of 32 is not 0.
FLASH_ATTENTION_INLINE std::uint32_t nonzero_bytes(const std::uint8_t* from) {
  constexpr std::uint64_t low_bits = 0x7f7f7f7f7f7f7f7fu, gather = 0x0102040810204080u;  // bit 8 * i to bit 56 + i
  std::uint32_t result = 0;
  for (int i = 0; i < 32; i += 8) {
    std::uint64_t bytes;
    __builtin_memcpy(&bytes, from + i, 8);
    const std::uint64_t ones = ((((bytes & low_bits) + low_bits) | bytes) & ~low_bits) >> 7;
    result |= static_cast<std::uint32_t>((ones * gather) >> 56) << i;
  }
  return result;
}

}  // namespace
}  // namespace flash_attention::cpu
