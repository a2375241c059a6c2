#pragma once

// How the producer warp of forward/sm90 and forward/sm90_fp8 publishes tiles to the consumers: through a ring of tiles in
// shared memory, each with its Q; and the barriers of all rings.

#include "forward/sm90/tile_scheduler.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

/// chunk_dim: columns of a box of Q.
template <ForwardConfig config, typename S, typename Storage, int chunk_dim>
struct TileProducer {
  const AttentionArgs& args;
  Storage& shared;
  unsigned num_tiles = 0;          // published so far
  PipelineState<S::stages> kv{0};  // of the next block

  /// Where the next tile goes. No warpgroup reads it any more: all are at most three tiles behind.
  __device__ __forceinline__ Tile& next_tile() const { return shared.tiles[num_tiles % tile_stages]; }

  __device__ __forceinline__ static int batch_coordinate(const Tile& tile) {
    return config.features.packed ? 0 : tile.sequence.batch_idx;
  }

  /// Q_full announces the tile, and its Q where it sees any key.
  __device__ __forceinline__ void publish_tile(const Tile& tile) {
    const PipelineState<S::q_stages> q(num_tiles);
    const int row = static_cast<int>(tile.sequence.start_q) + tile.q_begin;
    ++num_tiles;
#pragma unroll 1
    for (int w = 0; w < S::row_groups; ++w) {
      ptx::mbarrier_wait(shared.Q_empty[q.stage][w], q.phase ^ 1);  // the warpgroup has read what was in its stage
      if (tile.sees_nothing()) {
        ptx::mbarrier_arrive(shared.Q_full[q.stage][w]);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(shared.Q_full[q.stage][w], S::q_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.Q[q.stage][w][c], args.maps[map_Q], shared.Q_full[q.stage][w], c * chunk_dim,
                         row + w * wg_rows, tile.head_idx, batch_coordinate(tile));
      }
    }
  }
};

/// By one thread, before any other waits.
template <typename S, typename Storage>
__device__ __forceinline__ void init_barriers(Storage& shared) {
  for (int s = 0; s < S::q_stages; ++s) {
    for (int w = 0; w < S::row_groups; ++w) {
      ptx::mbarrier_init(shared.Q_full[s][w], 1);
      // Those who make words of masks read the tile, too: they say so to the first warpgroup's.
      const int writers = S::makes_words && w == 0 ? mask_warps : 0;
      ptx::mbarrier_init(shared.Q_empty[s][w], S::warpgroups / S::row_groups + writers);
    }
  }
  if constexpr (S::wide) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.KV_full[s], 1);
      ptx::mbarrier_init(shared.KV_empty[s], S::cluster * S::warpgroups);
    }
    ptx::mbarrier_init(shared.cluster_sync, S::cluster);
    ptx::mbarrier_init(shared.P_full, S::warpgroups * wg_threads / 32);
    ptx::mbarrier_init(shared.P_empty, S::warpgroups);
  } else {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.K_full[s], 1);
      ptx::mbarrier_init(shared.V_full[s], 1);
      ptx::mbarrier_init(shared.K_empty[s], S::warpgroups);
      ptx::mbarrier_init(shared.V_empty[s], S::warpgroups);
    }
  }
  if constexpr (S::makes_words) {
    for (int w = 0; w < S::warpgroups; ++w) {
      ptx::mbarrier_init(shared.mask.full[w], mask_warps);
      ptx::mbarrier_init(shared.mask.empty[w], wg_threads / 32);
    }
  }
  ptx::mbarrier_init_fence();  // TMA sees the barriers
}

}  // namespace flash_attention::forward_sm90
