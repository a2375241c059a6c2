#pragma once

#include "ptx/convert.cuh"
#include "ptx/pairs.cuh"
#include "tile/narrow.cuh"

// Converts four 8-bit elements of a register, exactly, to two pairs of a 16-bit type, which the tensor cores multiply.
//
//   float8 -> float16   e4m3: cvt from sm_89 on. Before, the bits are moved and a product corrects the exponent's bias,
//                       which also makes numbers of subnormal codes; NaN is set by hand. e5m2: the upper byte of a float16
//   float16 -> bfloat16 by way of float: three instructions a pair, and NaN stays NaN
//   int8                the byte becomes the fraction of a large number, which is then subtracted

namespace flash_attention::tile {

/// Elements (0, 1) and (2, 3) of the register; even_odd: (0, 2) and (1, 3).
struct TwoPairs {
  unsigned first;
  unsigned second;
};

/// Two codes of e4m3 in the upper bytes of a register's halves, as float16.
__device__ __forceinline__ unsigned e4m3_in_upper_bytes(unsigned codes) {
  const unsigned magnitudes = codes & 0x7f007f00u;
  const unsigned halves = ptx::multiply_half_pairs((codes & 0x80008000u) | magnitudes >> 1, 0x5c005c00u);  // times 2^8
  const unsigned nan = (magnitudes + 0x01000100u) & 0x80008000u;                                           // the code 0x7f
  return halves | (nan - (nan >> 5));  // an exponent of ones
}

/// float8 as pairs of float16.
template <Type code, bool even_odd>
__device__ __forceinline__ TwoPairs to_half_pairs(unsigned codes) {
  constexpr unsigned first = even_odd ? 0x2404u : 0x1404u, second = even_odd ? 0x3414u : 0x3424u;  // into upper bytes
  if constexpr (code == Type::e5m2) {
    return {ptx::permute_bytes(codes, 0, first), ptx::permute_bytes(codes, 0, second)};
  } else {
#if __CUDA_ARCH__ >= 890
    if (even_odd) codes = ptx::permute_bytes(codes, 0, 0x3120u);
    return {ptx::e4m3_to_half_pair(static_cast<unsigned short>(codes)), ptx::e4m3_to_half_pair(ptx::upper_half(codes))};
#else
    return {e4m3_in_upper_bytes(ptx::permute_bytes(codes, 0, first)),
            e4m3_in_upper_bytes(ptx::permute_bytes(codes, 0, second))};
#endif
  }
}

/// int8: 1024 + 128 + x is a float16 with x + 128 in its last bits. A bfloat16 has room for seven of the eight bits:
/// 128 + (x mod 128), from which 128 is subtracted, or 256 if x is negative.
template <Type type>
__device__ __forceinline__ unsigned int8_pair(unsigned bytes) {
  if constexpr (type == Type::float16) {
    return ptx::subtract_pairs<type>(bytes ^ 0x00800080u, 0x64806480u);
  } else {
    return ptx::subtract_pairs<type>(bytes & 0xff7fff7fu, bytes & 0xff80ff80u);
  }
}

template <Type code, Type type, bool even_odd = false>
__device__ __forceinline__ TwoPairs to_pairs(unsigned codes) {
  if constexpr (code == Type::int8) {
    constexpr unsigned large = type == Type::float16 ? 0x64646464u : 0x43434343u;
    return {int8_pair<type>(ptx::permute_bytes(codes, large, even_odd ? 0x4240u : 0x4140u)),
            int8_pair<type>(ptx::permute_bytes(codes, large, even_odd ? 0x4341u : 0x4342u))};
  } else if constexpr (type == Type::float16) {
    return to_half_pairs<code, even_odd>(codes);
  } else {  // any two of the floats can form a pair
    constexpr Type half = Type::float16;
    const TwoPairs halves = to_half_pairs<code, false>(codes);
    const float value[4] = {ptx::unpack_low<half>(halves.first), ptx::unpack_high<half>(halves.first),
                            ptx::unpack_low<half>(halves.second), ptx::unpack_high<half>(halves.second)};
    constexpr int second = even_odd ? 2 : 1;
    return {ptx::pack<type>(value[0], value[second]), ptx::pack<type>(value[3 - second], value[3])};
  }
}

}  // namespace flash_attention::tile
