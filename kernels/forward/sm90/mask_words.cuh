#pragma once

// Which pairs of a tested block are visible, a bit a pair, if masks choose the blocks. Of the producer warpgroup three
// warps have nothing to load. They follow the tiles and their lists and make the words of a block while the warpgroups
// attend to the one before:
//
//     for each tile, for each block of its list that the masks cut, for each warpgroup:
//       make the words of some rows (mask/word_maker.cuh)
//       wait until the warpgroup has read its words; store
//
// What a mask knows of a key is read or computed once for 64 rows, and of a row once for a tile. Edges of windows and
// lengths are not asked here: they are a shift for the warpgroups (hide_pairs.cuh), and blocks that nothing else cuts have
// no words.

#include "forward/sm90/block_list.cuh"
#include "mask/word_maker.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct MaskWriter {
  using S = Shape<config>;
  using Words = mask::Words<S::block_kv>;
  static constexpr int rows_of_warp = tile::ceil_div(wg_rows, mask_warps);  // of each warpgroup
  using Maker = mask::WordMaker<config.features, S::block_kv, rows_of_warp>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warp;  // of the three
  const int lane;
  unsigned odd_writes = 0;  // a bit for each warpgroup: whether so many blocks were written

  /// All tiles of all attempts.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const PipelineState<S::q_stages> q(n);
      ptx::mbarrier_wait(shared.Q_full[q.stage][0], q.phase);  // the next tile is known
      const Tile tile = shared.tiles[n % tile_stages];
      __syncwarp();  // all lanes have read it
      if (lane == 0) ptx::mbarrier_arrive(shared.Q_empty[q.stage][0]);
      if (tile.work == Work::none) {
        ptx::mbarrier_wait(shared.Q_empty[q.stage][0], q.phase);  // all tiles of the attempt are done and marked
        if (shared.last_attempt <= static_cast<int>(tile.attempt)) return;
      } else if (!tile.sees_nothing()) {
        write_tile(tile);
      }
    }
  }

 private:
  __device__ __forceinline__ void write_tile(const Tile& tile) {
    const Maker maker{args, tile.sequence, tile.head_idx, lane, {args, tile.sequence, tile.head_idx}};
    typename Maker::Row own[S::warpgroups];
#pragma unroll
    for (int w = 0; w < S::warpgroups; ++w) own[w] = maker.row_at(first_row(tile, w) + lane);
    auto list = BlockList<config>::from_first(args, tile);
    int block = list.seek(tile.first);
#pragma unroll 1
    while (block >= 0) {
      const ListedBlock described = list.describe(block, tile.attempt);
      const auto is_wanted = [&](int w) { return described.is_seen(w) && described.is_masked(w); };
      if (is_wanted(0) || is_wanted(S::warpgroups - 1)) {
        ptx::path<"forward/sm90 words of a mask">();
        const typename Maker::Keys known = maker.keys_at(block * S::block_kv);
#pragma unroll 1
        for (int w = 0; w < S::warpgroups; ++w) {
          if (!is_wanted(w)) continue;
          store_words(maker.words(known, w == 0 ? own[0] : own[S::warpgroups - 1], first_row(tile, w)), w);
        }
      }
      block = list.after(block);
    }
  }

  __device__ __forceinline__ int first_row(const Tile& tile, int w) const {
    return tile.q_begin + w * wg_rows + warp * rows_of_warp;
  }

  __device__ __forceinline__ void store_words(const Words& words, int w) {
    ptx::mbarrier_wait(shared.mask.empty[w],
                       (odd_writes >> w & 1) ^ 1);  // the warpgroup has read those of the block before
    const int row = warp * rows_of_warp + lane;
    if (lane < rows_of_warp && row < wg_rows) shared.mask.words[w][row] = words;
    __syncwarp();  // those of all rows
    if (lane == 0) ptx::mbarrier_arrive(shared.mask.full[w]);
    odd_writes ^= 1u << w;
  }
};

}  // namespace flash_attention::forward_sm90
