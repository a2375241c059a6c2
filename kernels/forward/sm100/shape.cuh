#pragma once

// Sizes of forward/sm100, its shared memory and its barriers.

#include "abi/args.h"
#include "abi/forward_sm100.h"
#include "abi/tensor_maps.h"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm100 {

using namespace abi;
using namespace abi::forward_sm90_maps;

constexpr int wg_threads = 128;
constexpr int wg_warps = 4;
constexpr int rows = forward_sm100_rows;  // of a Q tile: a thread of its softmax warpgroup has one
constexpr int chunk_dim = 64;             // tiles are stored in chunks of 64 columns: 128 bytes, the width of the swizzle
constexpr int chunk_row_bytes = 128;

template <ForwardConfig config>
struct Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;
  static constexpr ForwardSm100Layout layout = forward_sm100_layout(config);

  static constexpr int q_tiles = config.block_q / rows, block_kv = config.block_kv;
  static constexpr int warpgroups = q_tiles + 2, threads = warpgroups * wg_threads;
  static constexpr int k_stages = layout.k_stages, v_stages = layout.v_stages;
  static constexpr int chunks = tile::ceil_div(config.head_dim, chunk_dim);
  static constexpr int chunks_v = tile::ceil_div(config.head_dim_v, chunk_dim);
  static constexpr int width_v = forward_sm100_width_v(config.head_dim_v);
  static constexpr int steps_qk = tile::ceil_div(config.head_dim, 16), steps_pv = block_kv / 16;
  static constexpr int q_bytes = rows * chunks * chunk_row_bytes;
  static constexpr int k_bytes = block_kv * chunks * chunk_row_bytes, v_bytes = block_kv * chunks_v * chunk_row_bytes;

  // Columns of tensor memory, from the allocation's first on. P, two values in a column, lies over the S that it is made
  // of.
  static constexpr int tensor_columns = layout.tensor_columns;
  __device__ __forceinline__ static constexpr int column_S(int t) { return t * block_kv; }
  __device__ __forceinline__ static constexpr int column_O(int t) { return q_tiles * block_kv + t * width_v; }

  // A NaN or Inf in V reaches queries that do not see it through 0 * NaN in P V. Such rows are computed again.
  // V comes in whole blocks of keys, so keys past a sequence's end are hidden ones, too.
  static constexpr bool repairs_rows = tile::Visibility<features>::hides || features.has_lengths();
  static_assert(block_kv == forward_sm100_block_kv && config.num_warps == forward_sm100_warps(config.block_q));
};

/// What a softmax warp tells the output warp of the same rows: the factor of O, at the end a row's sum and maximum.
struct Mail {
  float first[rows];
  float second[rows];
};

template <ForwardConfig config>
struct SharedStorage {
  using S = Shape<config>;
  using Element = typename S::Element;
  alignas(1024) Element Q[S::q_tiles][S::chunks][rows * chunk_dim];
  alignas(1024) Element K[S::k_stages][S::chunks][S::block_kv * chunk_dim];
  alignas(1024) Element V[S::v_stages][S::chunks_v][S::block_kv * chunk_dim];
  Mail mail[S::q_tiles];
  unsigned tensor_base;  // the first column of the allocation

  // TMA completes a full barrier; tcgen05.commit completes an empty one, and those of S and O.
  ptx::Mbarrier Q_full[S::q_tiles], Q_empty[S::q_tiles];
  ptx::Mbarrier K_full[S::k_stages], K_empty[S::k_stages];
  ptx::Mbarrier V_full[S::v_stages], V_empty[S::v_stages];
  ptx::Mbarrier S_full[S::q_tiles];   // S = Q K^T is done
  ptx::Mbarrier P_ready[S::q_tiles];  // P is written, by its softmax warps; O is rescaled, by the output warps
  ptx::Mbarrier O_done[S::q_tiles];   // O += P V is done
  ptx::Mbarrier mail_full[S::q_tiles], mail_empty[S::q_tiles];
};

template <ForwardConfig config>
constexpr bool fits_layout = sizeof(SharedStorage<config>) <= Shape<config>::layout.shared_bytes;

template <ForwardConfig config>
__device__ __forceinline__ void init_barriers(SharedStorage<config>& shared) {
  using S = Shape<config>;
  for (int t = 0; t < S::q_tiles; ++t) {
    ptx::mbarrier_init(shared.Q_full[t], 1);
    ptx::mbarrier_init(shared.Q_empty[t], 1);
    ptx::mbarrier_init(shared.S_full[t], 1);
    ptx::mbarrier_init(shared.P_ready[t], 2 * wg_warps);
    ptx::mbarrier_init(shared.O_done[t], 1);
    ptx::mbarrier_init(shared.mail_full[t], wg_warps);
    ptx::mbarrier_init(shared.mail_empty[t], wg_warps);
  }
  for (int stage = 0; stage < S::k_stages; ++stage) {
    ptx::mbarrier_init(shared.K_full[stage], 1);
    ptx::mbarrier_init(shared.K_empty[stage], 1);
  }
  for (int stage = 0; stage < S::v_stages; ++stage) {
    ptx::mbarrier_init(shared.V_full[stage], 1);
    ptx::mbarrier_init(shared.V_empty[stage], 1);
  }
  ptx::mbarrier_init_fence();
}

/// One arrival for a warp, after what all its lanes did.
__device__ __forceinline__ void arrive_warp(ptx::Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace flash_attention::forward_sm100
