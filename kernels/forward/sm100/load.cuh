#pragma once

// The warp of forward/sm100 that loads. One lane issues every copy of TMA, as far ahead as there are free stages:
//
//   for each tile:  Q of the first Q tile, K of the first block, Q of the second Q tile, V of the first block
//                   for each further block:  K, V

#include "forward/sm100/tiles.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace flash_attention::forward_sm100 {

template <ForwardConfig config>
struct Loader {
  using S = Shape<config>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  tile::PipelineState<S::k_stages> k{0};
  tile::PipelineState<S::v_stages> v{0};
  unsigned num_loaded[S::q_tiles] = {};  // Q tiles so far

  __device__ __forceinline__ void load(const Tile<config>& tile) {
    const int batch_idx = config.features.packed ? 0 : tile.sequence.batch_idx;
    const int kv_head = tile.head_idx / args.group, first_key = static_cast<int>(tile.sequence.start_kv);
    bool is_first = true;
    tile.for_blocks([&](int block, unsigned) {
      const int row = first_key + block * S::block_kv;
      if (is_first) load_queries(tile, 0, batch_idx);
      ptx::mbarrier_wait(shared.K_empty[k.stage], k.phase ^ 1);  // stages begin empty: phase 1 counts as completed
      ptx::mbarrier_arrive_expect_tx(shared.K_full[k.stage], S::k_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c)
        ptx::tma_load_4d(shared.K[k.stage][c], args.maps[map_K], shared.K_full[k.stage], c * chunk_dim, row, kv_head,
                         batch_idx);
      k.advance();
      if (is_first && S::q_tiles == 2) load_queries(tile, S::q_tiles - 1, batch_idx);
      is_first = false;
      ptx::mbarrier_wait(shared.V_empty[v.stage], v.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.V_full[v.stage], S::v_bytes);
#pragma unroll
      for (int c = 0; c < S::chunks_v; ++c)
        ptx::tma_load_4d(shared.V[v.stage][c], args.maps[map_V], shared.V_full[v.stage], c * chunk_dim, row, kv_head,
                         batch_idx);
      v.advance();
    });
  }

  /// Waits until all stages are empty: a commit that is under way must not arrive when the block has ended.
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    for (int i = 0; i < S::k_stages; ++i, k.advance()) ptx::mbarrier_wait(shared.K_empty[k.stage], k.phase ^ 1);
#pragma unroll 1
    for (int i = 0; i < S::v_stages; ++i, v.advance()) ptx::mbarrier_wait(shared.V_empty[v.stage], v.phase ^ 1);
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) ptx::mbarrier_wait(shared.Q_empty[t], static_cast<int>(num_loaded[t] & 1) ^ 1);
  }

 private:
  /// The rows of Q tile t, in two boxes of 64 for each chunk. A Q tile without keys is not loaded.
  __device__ __forceinline__ void load_queries(const Tile<config>& tile, int t, int batch_idx) {
    if (!tile.has_keys(t)) return;
    ptx::mbarrier_wait(shared.Q_empty[t], static_cast<int>(num_loaded[t] & 1) ^ 1);  // the tile before it is multiplied
    ptx::mbarrier_arrive_expect_tx(shared.Q_full[t], S::q_bytes);
    constexpr int box = 64;
    const int row = static_cast<int>(tile.sequence.start_q) + tile.first_row(t);
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int first = 0; first < rows; first += box) {
        ptx::tma_load_4d(shared.Q[t][c] + first * chunk_dim, args.maps[map_Q], shared.Q_full[t], c * chunk_dim, row + first,
                         tile.head_idx, batch_idx);
      }
    }
    ++num_loaded[t];
  }
};

}  // namespace flash_attention::forward_sm100
