#pragma once

#include "abi/append.h"
#include "tile/groups.cuh"

// Groups of a row as codes of 4 bits, with their scales and zeros: what decode/append writes to a 4-bit cache
// (docs/numerics.md, "4-bit caches").

namespace flash_attention::decode {

using namespace abi;

/// e2m1, to nearest even, clipped to 6.
__device__ __forceinline__ unsigned to_e2m1(float value) {
  const float m = ptx::abs(value);
  const int magnitude = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return static_cast<unsigned>(magnitude) | (__builtin_bit_cast(unsigned, value) >> 28 & 8u);
}

/// Where a group's codes, scale and zero go.
template <typename Scale>
struct GroupPlace {
  unsigned char* codes;
  Scale* scale;
  Scale* zero;
};

/// Writes the codes of 8 columns at a time. code_of(column).
template <int group, typename CodeOf>
__device__ __forceinline__ void store_codes(unsigned char* to, CodeOf code_of) {
  const bool by_words = reinterpret_cast<unsigned long long>(to) % 4 == 0;
#pragma unroll 1
  for (int first = 0; first < group; first += 8) {
    unsigned word = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) word |= code_of(first + c) << 4 * c;
    if (by_words) {
      *reinterpret_cast<unsigned*>(to + first / 2) = word;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[first / 2 + i] = static_cast<unsigned char>(word >> 8 * i);
    }
  }
}

/// The smallest and the largest of a group, and whether a NaN is among them.
struct GroupRange {
  float low, high;
  bool nan = false;

  template <int group>
  __device__ __forceinline__ static GroupRange of(const float* x) {
    GroupRange range{x[0], x[0]};
#pragma unroll 1
    for (int c = 0; c < group; ++c) {
      range.nan = range.nan || x[c] != x[c];
      range.low = ptx::min(range.low, x[c]);
      range.high = ptx::max(range.high, x[c]);
    }
    return range;
  }
  __device__ __forceinline__ float largest() const { return ptx::max(ptx::abs(low), ptx::abs(high)); }
};

/// e2m1 with a scale that is 1 / factor.
template <int group>
__device__ __forceinline__ void store_e2m1(const float* x, float factor, bool nan, unsigned char* to) {
  store_codes<group>(to, [&](int c) { return nan ? 0u : to_e2m1(x[c] * factor); });
}

template <AppendConfig config, typename Scale>
__device__ __forceinline__ void store_group(const float* x, float tensor_scale, const GroupPlace<Scale>& to) {
  constexpr int group = config.group;
  const GroupRange range = GroupRange::of<group>(x);
  if constexpr (config.cache_dtype == Type::nvfp4) {
    const float wanted = ptx::max(range.largest() / (6 * tensor_scale), 0x1p-9f);
    const tile::e4m3 scale = tile::encode<Type::e4m3>(wanted);
    *to.scale = range.nan ? 0x7f : scale.bits;
    store_e2m1<group>(x, 1 / (tile::to_float(scale) * tensor_scale), range.nan, to.codes);
  } else if constexpr (config.cache_dtype == Type::mxfp4) {
    // 6 * 2^e is 1.5 * 2^(e + 2).
    const unsigned bits = __builtin_bit_cast(unsigned, range.largest());
    const int wanted = static_cast<int>(bits >> 23) - 2 + ((bits & 0x7fffffu) > 0x400000u);
    constexpr bool of_half = config.dtype == Type::float16;
    const int exponent = tile::min(tile::max(wanted, of_half ? 103 : 27), of_half ? 142 : 254);
    *to.scale = static_cast<unsigned char>(range.nan ? 255 : exponent);
    store_e2m1<group>(x, tile::e8m0_to_float(static_cast<unsigned>(254 - exponent)), range.nan, to.codes);
  } else {
    constexpr float finite = config.dtype == Type::float16    ? 65504.0f
                             : config.dtype == Type::bfloat16 ? 3.3895313892515355e38f
                                                              : 3.4028234663852886e38f;
    const auto clipped = [](float value) { return ptx::min(ptx::max(value, -finite), finite); };
    const Scale zero = ptx::from_float<Scale>(clipped(range.low));
    const float from = tile::to_float(zero);
    const Scale scale = ptx::from_float<Scale>(clipped(range.high) / 15 - from / 15);
    const float step = tile::to_float(scale), factor = step > 0 ? 1 / step : 0;
    *to.scale = scale;
    *to.zero = range.nan ? ptx::from_float<Scale>(__builtin_bit_cast(float, 0x7fc00000u)) : zero;
    store_codes<group>(to.codes, [&](int c) {
      const float code = (clipped(x[c]) - from) * factor;
      // A sum with 1.5 * 2^23 rounds to an integer, which its low bits then are.
      const float of_range = code > 0 ? (code < 15 ? code : 15.0f) : 0.0f;
      return range.nan ? 0u : __builtin_bit_cast(unsigned, of_range + 12582912.0f) & 15u;
    });
  }
}

}  // namespace flash_attention::decode
