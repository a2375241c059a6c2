#pragma once

// Tiles of floats in shared memory, for CUDA cores: four elements at a time on the way in and out.

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "tile/element.cuh"
#include "tile/sequence.cuh"

namespace flash_attention {

/// Loads four neighbours from shared memory with one instruction.
__device__ __forceinline__ tile::Four load_four(const float& from) {
  return ptx::load_shared<tile::Four>(ptx::shared_address(&from));
}

/// Loads rows of a tensor to shared memory, as floats. Rows that do not exist become zero.
template <int threads, int dim, int rows, int columns, typename Element>
__device__ __forceinline__ void load_tile(float (&to)[rows][columns], const tile::Rows<const Element>& from) {
  using Raw = ptx::Vector<Element, 4>;
  for (int group = threadIdx.x; group < rows * dim / 4; group += threads) {
    const int row = group / (dim / 4), d = group % (dim / 4) * 4;
    Raw raw{};
    if (row < from.count) raw = ptx::load_readonly(reinterpret_cast<const Raw*>(from.row(row) + d));
    const tile::Four values{{ptx::to_float(raw[0]), ptx::to_float(raw[1]), ptx::to_float(raw[2]), ptx::to_float(raw[3])}};
    ptx::store_shared(ptx::shared_address(&to[row][d]), values);
  }
}

/// Stores four sums, times a factor and rounded, to global memory.
template <typename Element>
__device__ __forceinline__ void store_four(Element* to, const tile::Four& values, float factor) {
  ptx::Vector<Element, 4> rounded;
#pragma unroll
  for (int c = 0; c < 4; ++c) rounded[c] = ptx::from_float<Element>(values[c] * factor);
  ptx::store_global(reinterpret_cast<ptx::Vector<Element, 4>*>(to), rounded);
}

}  // namespace flash_attention
