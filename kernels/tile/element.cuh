#pragma once

#include "abi/config.h"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "tile/narrow.cuh"

// Groups of four elements of a tensor, as floats. One instruction moves four elements of any type: 16 bytes of float, 8
// of a 16-bit type, 4 of an 8-bit type.

namespace flash_attention::tile {

using namespace abi;
using Four = ptx::Vector<float, 4>;

/// Whether one instruction can move every group of four elements in rows that are `stride` apart.
template <typename Element>
__device__ __forceinline__ bool moves_by_four(const Element* data, long long stride) {
  return reinterpret_cast<unsigned long long>(data) % (4 * sizeof(Element)) == 0 && stride % 4 == 0;
}

template <typename Element>
__device__ __forceinline__ Four load_four(const Element* from, bool by_four) {
  Four result;
  if (by_four) {
    const auto raw = *reinterpret_cast<const ptx::Vector<Element, 4>*>(from);
#pragma unroll
    for (int c = 0; c < 4; ++c) result[c] = to_float(raw[c]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) result[c] = to_float(from[c]);
  }
  return result;
}

/// The first `count` of four elements, then zeros: for a head dimension that is no multiple of 4.
template <typename Element>
__device__ __forceinline__ Four load_some(const Element* from, int count) {
  Four result{};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < count) result[c] = to_float(from[c]);
  }
  return result;
}

/// Four elements of a row of `dim` elements, from `column` on. Elements past the row are zero.
template <int dim, typename Element>
__device__ __forceinline__ Four load_four_of(const Element* row, int column, bool by_four) {
  if constexpr (dim % 4 == 0) {
    if (column >= dim) return {};
    return load_four(row + column, by_four);
  } else {
    return load_some(row + column, dim - column);
  }
}

template <typename Element>
__device__ __forceinline__ void store_four(Element* to, const Four& values, bool by_four) {
  ptx::Vector<Element, 4> rounded;
#pragma unroll
  for (int c = 0; c < 4; ++c) rounded[c] = ptx::from_float<Element>(values[c]);
  if (by_four) {
    *reinterpret_cast<ptx::Vector<Element, 4>*>(to) = rounded;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = rounded[c];
  }
}

/// The same as a store to a row of `dim` elements. Nothing past the row is written.
template <int dim, typename Element>
__device__ __forceinline__ void store_four_of(Element* row, int column, const Four& values, bool by_four) {
  if constexpr (dim % 4 == 0) {
    if (column < dim) store_four(row + column, values, by_four);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (column + c < dim) row[column + c] = ptx::from_float<Element>(values[c]);
    }
  }
}

}  // namespace flash_attention::tile
