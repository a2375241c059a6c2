#pragma once

// A row in the registers of a warp: the 32 lanes hold neighbouring columns, so that each load is one request for
// neighbouring addresses.

#include "ladder/parts/warp.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "tile/math.cuh"

namespace flash_attention {

/// A lane's columns of a row: lane, lane + 32, ...
template <int dim>
struct Columns {
  static constexpr int count = tile::ceil_div(dim, 32);
  float values[count];

  template <typename Element>
  __device__ __forceinline__ void load(const Element* row, int lane) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      values[c] = d < dim ? ptx::to_float(ptx::load_readonly(row + d)) : 0;
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(Element* row, int lane, float factor) const {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      if (d < dim) ptx::store_global(row + d, ptx::from_float<Element>(values[c] * factor));
    }
  }

  __device__ __forceinline__ void add(float weight, const Columns& row) {
#pragma unroll
    for (int c = 0; c < count; ++c) values[c] = ptx::fma(weight, row.values[c], values[c]);
  }
};

/// The dot product of two rows, in every lane.
template <int dim>
__device__ __forceinline__ float dot(const Columns<dim>& a, const Columns<dim>& b) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < a.count; ++c) sum = ptx::fma(a.values[c], b.values[c], sum);
  return warp_sum(sum);
}

}  // namespace flash_attention
