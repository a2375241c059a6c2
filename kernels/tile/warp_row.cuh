#pragma once

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/narrow.cuh"
#include "tile/swizzle.cuh"

// Sums over single rows, by one warp, element by element. Tensor cores multiply the zero of a hidden score by the key's
// value; if that is NaN or Inf, the row becomes NaN. The few rows that this has reached are computed again with these
// functions, which touch only visible keys.

namespace flash_attention::tile {

/// The dot product of two rows (pointers, or what has elements as they do), in every lane.
template <int dim, typename RowA, typename RowB>
__device__ __forceinline__ float warp_dot(RowA a, RowB b, int lane) {
  float sum = 0;
  for (int d = lane; d < dim; d += 32) sum = ptx::fma(to_float(a[d]), to_float(b[d]), sum);
#pragma unroll
  for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2) sum += ptx::shuffle_xor(sum, lane_mask);
  return sum;
}

/// A weighted sum of rows; lane l holds elements l, l + 32, ...
template <int dim>
struct WarpRow {
  static constexpr int parts = ceil_div(dim, 32);
  float sum[parts] = {};

  template <typename Row>
  __device__ __forceinline__ void add(float weight, Row row, int lane) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int d = lane + 32 * part;
      if (d < dim) sum[part] = ptx::fma(weight, to_float(row[d]), sum[part]);
    }
  }

  /// The dot product with a row, in every lane.
  template <typename Element>
  __device__ __forceinline__ float dot(const Element* row, int lane) const {
    float total = 0;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int d = lane + 32 * part;
      if (d < dim) total = ptx::fma(sum[part], to_float(row[d]), total);
    }
#pragma unroll
    for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2) total += ptx::shuffle_xor(total, lane_mask);
    return total;
  }

  /// Whether all of this lane's elements are NaN.
  __device__ __forceinline__ bool all_nan(int lane) const {
    bool result = true;
#pragma unroll
    for (int part = 0; part < parts; ++part) result = result && (lane + 32 * part >= dim || sum[part] != sum[part]);
    return result;
  }

  /// Stores the row to a row of a swizzled tile.
  template <abi::Type type, typename Tile>
  __device__ __forceinline__ void store(unsigned tile_address, int row, int lane) const {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      using Element = ptx::Element<type>;
      constexpr int per_chunk = Tile::template per_chunk<Element>;
      const int d = lane + 32 * part;
      const unsigned place = d % per_chunk * static_cast<int>(sizeof(Element));
      if (d < dim)
        ptx::store_shared(tile_address + Tile::offset(row, d / per_chunk) + place, ptx::from_float<Element>(sum[part]));
    }
  }

  /// Stores the row, times a factor, to a row of a tensor.
  template <typename Element>
  __device__ __forceinline__ void store(Element* row, float factor, int lane) const {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int d = lane + 32 * part;
      if (d < dim) ptx::store_global(row + d, ptx::from_float<Element>(sum[part] * factor));
    }
  }
};

}  // namespace flash_attention::tile
