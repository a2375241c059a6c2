#pragma once

// The products of the backward rungs on CUDA cores. Both dq and dkv use them, because they are mirror images: dq
// has rows of queries and tiles of keys, dkv has rows of keys and tiles of queries.

#include "ladder/parts/float_tile.cuh"

namespace flash_attention {

/// Multiplies the lane's row of the tile with every row of the warp: S = Q K^T and dP = dO V^T, or both transposed.
template <int dim, int rows, typename Storage>
__device__ __forceinline__ void dot_products(float (&S)[rows], float (&dP)[rows], const Storage& storage, int warp_row,
                                             int lane) {
#pragma unroll 4
  for (int d = 0; d < dim; d += 4) {
    const tile::Four a = load_four(storage.tile[0][lane][d]), b = load_four(storage.tile[1][lane][d]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const tile::Four own_a = load_four(storage.own[0][warp_row + r][d]),
                       own_b = load_four(storage.own[1][warp_row + r][d]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[r] = ptx::fma(own_a[c], a[c], S[r]);
        dP[r] = ptx::fma(own_b[c], b[c], dP[r]);
      }
    }
  }
}

/// sum[r] += weights of row r times the rows of the tile: the lane's four columns.
template <int rows, int tile_rows, int block_rows, int columns>
__device__ __forceinline__ void add_rows(tile::Four (&sum)[rows], const float (&weights)[block_rows][tile_rows],
                                         const float (&from)[tile_rows][columns], int warp_row, int column) {
#pragma unroll 4
  for (int j = 0; j < tile_rows; j += 4) {
    tile::Four values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = load_four(from[j + e][column]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const tile::Four weight = load_four(weights[warp_row + r][j]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] = ptx::fma(weight[e], values[e][c], sum[r][c]);
      }
    }
  }
}

}  // namespace flash_attention
