#pragma once

#include "tile/element.cuh"
#include "tile/math.cuh"

// Codes of 4 bits, two in a byte, the first in the lower half; their scales are those of groups of columns
// (docs/numerics.md, "4-bit caches"). A row of them as numbers, for kernels that take rows element by element.

namespace flash_attention::tile {

/// The number of a code: of e2m1, or 0 to 15.
template <Type code>
__device__ __forceinline__ float code_to_float(unsigned bits) {
  if constexpr (code == Type::int4) return static_cast<float>(bits & 15u);
  // The exponent's bias is put right by a product, which makes a number of what is subnormal, too.
  const float magnitude = __builtin_bit_cast(float, (bits & 7u) << 22) * 0x1p126f;
  return (bits & 8u) != 0 ? -magnitude : magnitude;
}

/// The bits of 2^(exponent - 127) as a float: e8m0, whose 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(unsigned exponent) {
  const unsigned bits = exponent == 0 ? 0x00400000u : exponent << 23;
  return __builtin_bit_cast(float, exponent == 255 ? 0x7fc00000u : bits);
}

/// The byte of e8m0 that counts: float16 holds 2^-24 to 2^15.
template <Type type>
__device__ __forceinline__ unsigned counted_e8m0(unsigned exponent) {
  if constexpr (type != Type::float16) return exponent;
  return exponent == 255 ? exponent : static_cast<unsigned>(min(max(static_cast<int>(exponent), 103), 142));
}

/// How the scales (int4: and zeros) of a format are stored.
template <Type code, Type type>
struct GroupScaleOf {
  using Kind = unsigned char;
};
template <Type type>
struct GroupScaleOf<Type::int4, type> {
  using Kind = ptx::Element<type>;
};
template <Features features>
using GroupScale = typename GroupScaleOf<features.kv_dtype, features.dtype>::Kind;

template <Features features>
__device__ __forceinline__ float group_scale(GroupScale<features> stored) {
  if constexpr (features.kv_dtype == Type::nvfp4) return to_float(e4m3{stored});
  if constexpr (features.kv_dtype == Type::mxfp4) return e8m0_to_float(counted_e8m0<features.dtype>(stored));
  if constexpr (features.kv_dtype == Type::int4) return to_float(stored);
}

/// A row of codes, from some column on: what is used of a pointer to elements.
template <Features features>
struct GroupRow {
  const unsigned char* codes;
  const GroupScale<features>* scales;
  const GroupScale<features>* zeros;
  int first = 0;

  __device__ __forceinline__ GroupRow operator+(int columns) const { return {codes, scales, zeros, first + columns}; }

  __device__ __forceinline__ GroupScale<features> zero_of(int group) const {
    if constexpr (features.kv_dtype == Type::int4) return zeros[group];
    return {};
  }

  __device__ __forceinline__ float operator[](int column) const {
    const int d = first + column, group = d / features.kv_group;
    const float code = code_to_float<features.kv_dtype>(static_cast<unsigned>(codes[d / 2]) >> d % 2 * 4);
    const float scale = group_scale<features>(scales[group]);
    if constexpr (features.kv_dtype == Type::nvfp4) return code * scale;
    // Rounded once to the type of the products: of mxfp4 what float16 does not hold.
    const float value = features.kv_dtype == Type::int4 ? ptx::fma(code, scale, to_float(zero_of(group))) : code * scale;
    return to_float(ptx::from_float<ptx::Element<features.dtype>>(value));
  }
};

template <Features features>
__device__ __forceinline__ Four load_four(const GroupRow<features>& row, bool /*by_four*/) {
  Four result;
#pragma unroll
  for (int c = 0; c < 4; ++c) result[c] = row[c];
  return result;
}

/// Rows are whole groups, so no four columns reach over an end.
template <int dim, Features features>
__device__ __forceinline__ Four load_four_of(const GroupRow<features>& row, int column, bool by_four) {
  if (column >= dim) return {};
  return load_four(row + column, by_four);
}

}  // namespace flash_attention::tile
