#pragma once

// The loading warp of forward/sm90: one lane issues every TMA copy, as far ahead as there are free slots.

#include "forward/sm90_schedule.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct Loader {
  using S = Shape<config>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  unsigned num_tiles = 0;  // loaded so far
  unsigned num_blocks = 0;

  /// The blocks of K and V from the last to the first. Q goes after the first K, which may find a free slot sooner.
  __device__ __forceinline__ void load(const Tile& tile) {
    if (!tile.exists || tile.begin == tile.end) return;
    const int batch_idx = config.features.packed ? 0 : tile.sequence.batch_idx;
    const int kv_head = tile.head_idx / args.group;
    const int q_row = static_cast<int>(tile.sequence.start_q) + tile.q_begin;
    const int kv_row = static_cast<int>(tile.sequence.start_kv);

#pragma unroll 1
    for (int block = tile.end - 1; block >= tile.begin; --block) {
      const int row = kv_row + block * S::block_kv;
      const Turn<S::stages> kv(num_blocks++);
      // The slot's earlier block has been read by every warpgroup. Slots start out free: parity 1 counts as completed.
      ptx::mbarrier_wait(shared.K_free[kv.slot], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.K_full[kv.slot], S::k_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.K[kv.slot][c], args.maps[map_K], shared.K_full[kv.slot], c * chunk_dim, row, kv_head,
                         batch_idx);
      }
      if (block == tile.end - 1) load_Q(q_row, tile.head_idx, batch_idx);
      ptx::mbarrier_wait(shared.V_free[kv.slot], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.V_full[kv.slot], S::v_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks_v; ++c) {
        ptx::tma_load_4d(shared.V[kv.slot][c], args.maps[map_V], shared.V_full[kv.slot], c * chunk_dim, row, kv_head,
                         batch_idx);
      }
    }
  }

  __device__ __forceinline__ void load_Q(int row, int head_idx, int batch_idx) {
    const Turn<S::q_stages> q(num_tiles++);
#pragma unroll 1
    for (int w = 0; w < S::warpgroups; ++w) {
      // That warpgroup has read its queries of the tile before.
      ptx::mbarrier_wait(shared.Q_free[q.slot][w], q.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.Q_full[q.slot][w], S::q_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.Q[q.slot][w][c], args.maps[map_Q], shared.Q_full[q.slot][w], c * chunk_dim,
                         row + w * wg_rows, head_idx, batch_idx);
      }
    }
  }
};

}  // namespace flash_attention::forward_sm90
