#pragma once

#include "ptx/pairs.cuh"
#include "tile/groups.cuh"
#include "tile/narrow_pairs.cuh"

// Eight codes of 4 bits in a register as four pairs of a 16-bit type, for tensor cores: pair n holds the codes n of the
// lower and of the upper half. A code becomes its number exactly, then meets the scale of its group.
//
//   e2m1   its three lower bits go to the lowest bits of the exponent and the highest of the fraction, which is the number
//          times a power of two, subnormal or not. Of nvfp4 most of that power is in the scales, and what they have no room
//          for, group_factor, in scores and probabilities; of mxfp4, whose scales take all exponents, a product puts it
//          right
//   int4   put into the fraction of a number that is large enough to hold it, and that number taken off

namespace flash_attention::tile {

/// The factor by which numbers of pairs become those of K or V.
template <Type code>
constexpr float group_factor = code == Type::nvfp4 ? 256.0f : 1.0f;

/// Pair n, without scale. Of nvfp4 times 2^-126, or in float16 2^-14.
template <Type code, Type type>
__device__ __forceinline__ unsigned code_pair(unsigned codes, int n) {
  if constexpr (code == Type::int4) {
    constexpr unsigned large = type == Type::float16 ? 0x64006400u : 0x43004300u;
    return ptx::subtract_pairs<type>((codes >> 4 * n & 0x000f000fu) | large, large);
  } else if constexpr (type == Type::bfloat16) {
    // One product moves the sign to bit 15 and the rest to bits 6 to 8: the two copies do not meet.
    const unsigned two = n < 2 ? codes : codes >> 8;
    const unsigned copies = n % 2 == 0 ? (two & 0x000f000fu) * 0x1040u : (two & 0x00f000f0u) * 0x0104u;
    const unsigned small = copies & 0x81c081c0u;
    return code == Type::nvfp4 ? small : ptx::multiply_pairs<type>(small, 0x7e807e80u);  // 2^126
  } else {
    const unsigned sign = codes << (12 - 4 * n), rest = n < 3 ? codes << (9 - 4 * n) : codes >> 3;
    const unsigned small = (sign & 0x80008000u) | (rest & 0x0e000e00u);
    return code == Type::nvfp4 ? small : ptx::multiply_pairs<type>(small, 0x74007400u);  // 2^14
  }
}

/// A pair with the scales of its two numbers, and of int4 their zeros.
template <Type code, Type type>
__device__ __forceinline__ unsigned scaled_pair(unsigned codes, int n, unsigned scales, unsigned zeros) {
  const unsigned pair = code_pair<code, type>(codes, n);
  return code == Type::int4 ? ptx::fma_pairs<type>(pair, scales, zeros) : ptx::multiply_pairs<type>(pair, scales);
}

/// A power of two of e8m0 in float16.
__device__ __forceinline__ unsigned e8m0_to_half(unsigned stored) {
  const unsigned exponent = counted_e8m0<Type::float16>(stored);
  if (exponent == 255) return 0x7e00u;
  return exponent >= 113 ? (exponent - 112) << 10 : 1u << (exponent - 103);
}

/// Two powers of two of e8m0, the bytes of a 16-bit number, as a pair.
template <Type type>
__device__ __forceinline__ unsigned e8m0_pair(unsigned bytes) {
  if constexpr (type == Type::float16) return e8m0_to_half(bytes & 0xffu) | e8m0_to_half(bytes >> 8 & 0xffu) << 16;
  const unsigned exponents = ptx::permute_bytes(bytes, 0, 0x4140u) << 7;
  // 255 is NaN, and 0 is subnormal: both have the highest bit of the fraction.
  const unsigned largest = exponents + 0x00800080u, others = exponents + 0x7fff7fffu;
  return exponents | ((largest | ~others) & 0x80008000u) >> 9;
}

/// Scales 2 i and 2 i + 1 of a row as a pair, as scaled_pair() takes them. `row`: as they are stored, in words.
template <Type code, Type type>
__device__ __forceinline__ unsigned scale_pair(const unsigned* row, int i) {
  if constexpr (code == Type::int4) return row[i];
  const unsigned bytes = row[i / 2] >> i % 2 * 16 & 0xffffu;
  if constexpr (code == Type::nvfp4) {
    constexpr unsigned power = type == Type::bfloat16 ? 0x7a807a80u : 0x54005400u;  // 2^126 or 2^14 over group_factor
    return ptx::multiply_pairs<type>(to_pairs<Type::e4m3, type>(bytes).first, power);
  } else {
    return e8m0_pair<type>(bytes);
  }
}

}  // namespace flash_attention::tile
