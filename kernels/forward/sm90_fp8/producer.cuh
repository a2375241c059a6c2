#pragma once

// The producer warp of forward/sm90_fp8: one lane issues every TMA copy, as far ahead as there are free stages.
//
//     for each tile of the scheduler:
//       publish the tile, with its Q                       forward/sm90/producer.cuh
//       for each KV block of the tile: wait for an empty stage; K, V^T -> shared

#include "forward/sm90/producer.cuh"
#include "forward/sm90_fp8/shape.cuh"
#include "forward/sm90_fp8/transpose_jobs.cuh"

namespace flash_attention::forward_sm90_fp8 {

using forward_sm90::batch_coordinate;
using forward_sm90::next_tile;
using forward_sm90::publish_tile;

template <ForwardConfig its_config>
struct Producer {
  static constexpr ForwardConfig config = its_config;
  using S = Shape<config>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  unsigned num_tiles = 0;          // published so far
  PipelineState<S::stages> kv{0};  // of the next block
  forward_sm90::BiasBoxes<config, SharedStorage<config>> biases{args, shared};
  int transposed_head = -1;        // transposes_late: the last head of keys whose V was waited for

  /// Loads all tiles. find_next(tile) fills in the next one, or returns false. With two stages for Q, a tile is published
  /// while the previous tile's keys are loaded.
  template <typename FindNext>
  __device__ __forceinline__ void load_tiles(const FindNext& find_next) {
    constexpr bool early = S::q_stages == 2;
    bool exists = find_next(next_tile(*this));
    if (early && exists) publish_tile<chunk_dim>(*this, next_tile(*this));
#pragma unroll 1
    while (exists) {
      const Tile& tile = early ? shared.tiles[(num_tiles - 1) % tile_stages] : next_tile(*this);
      const int blocks = tile.blocks;
      if (!early && blocks == 0) publish_tile<chunk_dim>(*this, tile);
#pragma unroll 1
      for (int n = 0; n < blocks; ++n) {
        load_keys(tile, block_at<config>(tile, n), !early && n == 0);
        if (early && n == 1) {
          exists = find_next(next_tile(*this));
          if (exists) publish_tile<chunk_dim>(*this, next_tile(*this));
        }
      }
      if (early && blocks > 1) continue;
      exists = find_next(next_tile(*this));
      if (early && exists) publish_tile<chunk_dim>(*this, next_tile(*this));
    }
    next_tile(*this) = {.attempt = Attempt::fixed_max};  // its work is none: no tile is left
    publish_tile<chunk_dim>(*this, next_tile(*this));
  }

 private:
  __device__ __forceinline__ void load_keys(const Tile& tile, int block, bool publish_between) {
    const int kv_head = tile.head_idx / args.group;
    const int row = static_cast<int>(tile.sequence.start_kv) + block * S::block_kv;
    // Every warpgroup has read the stage's previous block. Stages begin empty: phase 1 counts as completed.
    ptx::mbarrier_wait(shared.K_empty[kv.stage], kv.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.K_full[kv.stage], S::k_bytes);
    if constexpr (config.features.paged) {
      forward_sm90::PagedBlock<config>(args, tile, block)
          .template load<S::chunks>(shared.K[kv.stage][0], args.maps[map_K], shared.K_full[kv.stage]);
    } else {
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        ptx::tma_load_4d(shared.K[kv.stage][c], args.maps[map_K], shared.K_full[kv.stage], c * chunk_dim, row, kv_head,
                         batch_coordinate<config>(tile));
      }
    }
    if (publish_between) publish_tile<chunk_dim>(*this, tile);
    biases.load(tile, block);
    if constexpr (S::transposes_late) {
      if (const int head = tile.sequence.batch_idx * args.heads_kv + kv_head; head != transposed_head) {
        wait_for_values<config>(args, head);
        transposed_head = head;
      }
    }
    const int place =
        block * S::block_kv +
        (S::packed_values
             ? static_cast<int>(transposed_start(tile.sequence.start_kv, tile.sequence.batch_idx, S::block_kv))
             : 0);
    ptx::mbarrier_wait(shared.V_empty[kv.stage], kv.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.V_full[kv.stage], S::v_bytes);
#pragma unroll
    for (int c = 0; c < S::v_chunks; ++c) {
      ptx::tma_load_4d(shared.V[kv.stage][c], args.maps[map_V], shared.V_full[kv.stage], place + c * S::v_chunk, 0, kv_head,
                       S::packed_values ? 0 : tile.sequence.batch_idx);
    }
    kv.advance();
  }
};

}  // namespace flash_attention::forward_sm90_fp8
