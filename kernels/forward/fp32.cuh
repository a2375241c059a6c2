#pragma once

#include "forward/sm80/kernel.cuh"
#include "tile/fma_product.cuh"

// Attention forward of float32 with products and sums in fp32, on CUDA cores (precision = ieee): sm_80 and up, the whole
// contract.
//
// It is forward/sm80 with products of tile/fma_product.cuh: the same loop, copies, scores and epilogue.
//
//     for each KV block:  S = Q K^T;  P = softmax step -> shared memory;  O = O * rescale + P V
//     O / sum, lse -> global
//
// Only the warp itself reads P of its rows. P V is summed over a block first, and then added to O, so the sums are
// short.

namespace flash_attention {

template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::multiply_float_keys(Scores& S) const {
  tile::fma_rows<QTile, KTile, Shape::dim, true>(S, Q_smem, warp_row, K_smem, 0, lane);
}

template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::add_float_values(const Scores& P, const float (&rescale)[m_tiles][2]) {
  using PTile = tile::SwizzledTile<block_q, 2 * block_kv>;
  const unsigned P_smem = ptx::shared_address(&storage) + sizeof(SharedStorage);  // the planner reserves it
  __syncwarp();  // all lanes have read P of the previous block
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * m + 8 * half + place.row;
        const unsigned offset = PTile::offset(row, 2 * n + place.column / 4) + place.column % 4 * 4;
        ptx::store_shared(P_smem + offset, ptx::Vector<float, 2>{{P[m][n][2 * half], P[m][n][2 * half + 1]}});
      }
    }
  }
  __syncwarp();  // all lanes have written P
  constexpr int group = 64;  // columns that are summed at once
#pragma unroll
  for (int column = 0; column < dim_v; column += group) {
    constexpr int most = tile::min(group, dim_v);
    float sum[m_tiles][most / 8][4]{};
    const int pairs = tile::min(most, dim_v - column) / 16;
    tile::fma_tile<PTile, VTile, block_kv>(sum, P_smem, warp_row, V_smem, column / 16, lane, pairs);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < most / 8; ++n) {
        if (n >= 2 * pairs) break;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& o = O[m][column / 8 + n][e];
          o = ptx::fma(o, rescale[m][e / 2], sum[m][n][e]);
        }
      }
    }
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void forward_fp32(const AttentionArgs& args) {
  static_assert(config.features.dtype == Type::float32 && config.features.fp32_products);
  forward_sm80<config>(args);
}

}  // namespace flash_attention
