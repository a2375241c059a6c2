#pragma once

// The products of the backward rungs on tensor cores. A warp computes 16 rows: operands are loaded from shared
// memory by ldmatrix, or are the accumulators of the product before.

#include "ptx/memory.cuh"
#include "tile/mma.cuh"
#include "tile/sequence.cuh"

namespace flash_attention {

using namespace abi;

/// C = own tile^T, for 16 rows of the block and the rows of the tile from first_row on.
template <Type type, typename Own, typename Tile, int blocks>
__device__ __forceinline__ void dot_products(float (&C)[1][blocks][4], const Own& own, int warp_row, const Tile& tile,
                                             int first_row, int lane) {
  const unsigned own_address = tile::a_address<Own>(ptx::shared_address(&own), warp_row, lane);
  const unsigned tile_address = ptx::shared_address(&tile);
  tile::multiply<type, Own::columns / 16>(
      C, [&](unsigned(&A)[4], int, int step) { ptx::ldmatrix_x4(A, Own::step(own_address, 2 * step)); },
      [&](unsigned(&B)[4], int n, int step) {
        ptx::ldmatrix_x4(B, Tile::step(tile::b_transposed_address<Tile>(tile_address, first_row + 16 * n, lane), 2 * step));
      });
}

/// sum += weights tile, for 16 rows of weights and the rows of the tile from first_row on.
template <Type type, typename Tile, int blocks, int columns>
__device__ __forceinline__ void add_rows(float (&sum)[1][blocks][4], const float (&weights)[columns][4], const Tile& tile,
                                         int first_row, int lane) {
  const unsigned tile_address = ptx::shared_address(&tile);
  tile::multiply<type, columns / 2>(
      sum, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, weights[2 * step], weights[2 * step + 1]); },
      [&](unsigned(&B)[4], int n, int step) {
        ptx::ldmatrix_x4_trans(B, Tile::step(tile::b_address<Tile>(tile_address, first_row + 16 * step, lane), 2 * n));
      });
}

/// Stores 16 rows of a sum, rounded, to a tensor.
template <Type type, int dim, int blocks, typename Element>
__device__ __forceinline__ void store_rows(const tile::Rows<Element>& to, const float (&sum)[1][blocks][4], int warp_row,
                                           const tile::LanePlace& place, float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + place.row + 8 * half;
    if (row >= to.count) continue;
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
      const unsigned pair = ptx::pack<type>(sum[0][n][2 * half] * factor, sum[0][n][2 * half + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(to.row(row) + 8 * n + place.column), pair);
    }
  }
}

}  // namespace flash_attention
