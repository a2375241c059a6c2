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
  unsigned num_tiles = 0;  // handed over so far
  Turn<S::stages> kv{0};   // of the next block

  /// The tile and its Q, and the blocks of K and V from the last to the first. Where Q has one slot only, the first K goes
  /// before it: that may find a free slot sooner.
  __device__ __forceinline__ void load(const Tile& tile) {
    constexpr bool K_first = S::q_stages == 1;
    if (!K_first || tile.sees_nothing()) hand_over(tile);
    const int batch_idx = batch_coordinate(tile);
    const int kv_head = tile.head_idx / args.group;
    const int kv_row = static_cast<int>(tile.sequence.start_kv);
#pragma unroll 1
    for (int block = tile.end - 1; block >= tile.begin; --block) {
      const int row = kv_row + block * S::block_kv;
      // The slot's earlier block has been read by every warpgroup. Slots start out free: parity 1 counts as completed.
      ptx::mbarrier_wait(shared.K_free[kv.slot], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.K_full[kv.slot], S::k_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.K[kv.slot][c], args.maps[map_K], shared.K_full[kv.slot], c * chunk_dim, row, kv_head,
                         batch_idx);
      }
      if (K_first && block == tile.end - 1) hand_over(tile);
      ptx::mbarrier_wait(shared.V_free[kv.slot], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.V_full[kv.slot], S::v_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks_v; ++c) {
        ptx::tma_load_4d(shared.V[kv.slot][c], args.maps[map_V], shared.V_full[kv.slot], c * chunk_dim, row, kv_head,
                         batch_idx);
      }
      kv.advance();
    }
  }

  /// Tells the warpgroups that no tile is left in this pass.
  __device__ __forceinline__ void end_pass(Pass pass) { hand_over(Tile{.pass = pass}); }

  __device__ __forceinline__ static int batch_coordinate(const Tile& tile) {
    return config.features.packed ? 0 : tile.sequence.batch_idx;
  }

  /// Q_full announces the tile, and its Q where it sees any key.
  __device__ __forceinline__ void hand_over(const Tile& tile) {
    const Turn<S::q_stages> q(num_tiles);
    const int row = static_cast<int>(tile.sequence.start_q) + tile.q_begin;
    // The warpgroups have read the queries that were in this slot; so they are done with the tile before those, too.
#pragma unroll 1
    for (int w = 0; w < S::warpgroups; ++w) ptx::mbarrier_wait(shared.Q_free[q.slot][w], q.parity ^ 1);
    shared.tiles[num_tiles++ % tile_slots] = tile;
#pragma unroll 1
    for (int w = 0; w < S::warpgroups; ++w) {
      if (tile.sees_nothing()) {
        ptx::mbarrier_arrive(shared.Q_full[q.slot][w]);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(shared.Q_full[q.slot][w], S::q_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.Q[q.slot][w][c], args.maps[map_Q], shared.Q_full[q.slot][w], c * chunk_dim,
                         row + w * wg_rows, tile.head_idx, batch_coordinate(tile));
      }
    }
  }
};

}  // namespace flash_attention::forward_sm90
