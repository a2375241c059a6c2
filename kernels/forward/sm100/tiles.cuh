#pragma once

// The work tiles of a block, and the KV blocks that each visits. Every role goes through them by itself, in the same order.

#include "forward/sm100/shape.cuh"

namespace flash_attention::forward_sm100 {

/// block_q queries of one head: one or two Q tiles of 128 rows.
template <ForwardConfig config>
struct Tile {
  using S = Shape<config>;

  tile::Sequence sequence;
  int head_idx;
  int q_begin;
  tile::Score<S::features> score;
  tile::TileRange seen[S::q_tiles];  // the KV blocks that a Q tile sees, but for masks that hide some of them
  tile::TileRange all;               // of any Q tile

  __device__ __forceinline__ Tile(const AttentionArgs& args, const tile::Sequence& its_sequence, int head, int first_query)
      : sequence(its_sequence), head_idx(head), q_begin(first_query), score(args, its_sequence, head), all{0, 0} {
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) {
      seen[t] = score.sight.template key_tiles<rows, S::block_kv>(first_row(t));
      if (!has_keys(t)) continue;
      const bool is_first = all.begin == all.end;
      all = {is_first ? seen[t].begin : tile::min(all.begin, seen[t].begin), tile::max(all.end, seen[t].end)};
    }
  }

  __device__ __forceinline__ int first_row(int t) const { return q_begin + t * rows; }
  /// Whether a Q tile may see a key.
  __device__ __forceinline__ bool has_keys(int t) const { return seen[t].begin < seen[t].end; }

  /// Which Q tiles see something of a KV block: a bit for each.
  __device__ __forceinline__ unsigned seen_by(int block) const {
    unsigned tiles = 0;
#pragma unroll
    for (int t = 0; t < S::q_tiles; ++t) {
      bool visible = block >= seen[t].begin && block < seen[t].end;
      if constexpr (tile::Visibility<S::features>::skips_tiles)
        visible = visible && !score.sight.template masks_hide<rows, S::block_kv>(first_row(t), block * S::block_kv);
      tiles |= visible ? 1u << t : 0u;
    }
    return tiles;
  }

  /// Calls visit(block, seen_by) for each KV block of which something is seen, from the last to the first: the edges of a
  /// causal mask come first, and give the reference of the softmax.
  template <typename Visit>
  __device__ __forceinline__ void for_blocks(const Visit& visit) const {
#pragma unroll 1
    for (int block = all.end - 1; block >= all.begin; --block) {
      if (const unsigned tiles = seen_by(block); tiles != 0) visit(block, tiles);
    }
  }
};

/// Calls visit(tile) for each work tile of this block.
template <ForwardConfig config, typename Visit>
__device__ __forceinline__ void for_tiles(const AttentionArgs& args, const Visit& visit) {
  const int row_tiles = tile::ceil_div(args.seq_q, config.block_q), count = row_tiles * args.heads_q * args.batch;
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
    const auto place =
        tile::query_block(tile::by_work<config.features>(n, count, row_tiles, args.seq_kv), row_tiles, args.heads_q);
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, place.batch_idx);
    const int q_begin = place.tile_idx * config.block_q;
    if (q_begin < sequence.rows_q) visit(Tile<config>(args, sequence, place.head_idx, q_begin));
  }
}

}  // namespace flash_attention::forward_sm100
