#pragma once

// Which blocks of keys the 64 rows of a warpgroup see, of those that are loaded for its tile, and which of them are edges.

#include "forward/sm90/shape.cuh"
#include "ptx/path.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct BlocksSeen {
  /// The block nearest to the diagonal of a query.
  __device__ __forceinline__ static int block_at_diagonal(const tile::Score<config.features>& score, tile::TileRange loaded,
                                                          int q) {
    const int key = tile::min(q, score.len_q - 1) + score.len_kv - score.len_q;
    return tile::max(tile::min(tile::max(key, 0) / config.block_kv, loaded.end - 1), loaded.begin);
  }

  /// ALiBi without a right edge: the first block, which gives the fixed maximum, may be so far behind the diagonal that
  /// the keys near it outgrow what a row sum may be. Such a tile would be done twice: at 8192 tokens nearly all of them.
  __device__ __forceinline__ static bool begins_far_away(const tile::Score<config.features>& score, tile::TileRange loaded,
                                                         int q_begin) {
    if constexpr (!config.features.alibi || config.features.window_right || Shape<config>::from_diagonal) return false;
    constexpr float growth = Shape<config>::type == Type::float16 ? 7.0f : 20.0f;  // of e^11 and e^27: highest_sum
    const int distance = (loaded.end - 1) * config.block_kv - (q_begin + score.len_kv - score.len_q);
    return score.slope * static_cast<float>(distance) > growth;
  }

  /// The edges are the blocks at the diagonal, which raise the maximum, and a last one that ends among its keys.
  __device__ __forceinline__ static Blocks blocks_from_diagonal(const tile::Score<config.features>& score,
                                                                tile::TileRange loaded, int q_begin, Attempt attempt) {
    const int q_of_tile = q_begin / config.block_q * config.block_q;
    const int first = block_at_diagonal(score, loaded, q_of_tile + config.block_q - 1), blocks = loaded.end;
    if (config.features.mask || attempt != Attempt::fixed_max) return {0, blocks, blocks, blocks};
    const bool open = score.visible_kv % config.block_kv == 0 || first == blocks - 1;
    return {0, first - block_at_diagonal(score, loaded, q_begin) + 1, open ? blocks : blocks - 1, blocks};
  }

  __device__ __forceinline__ static Blocks blocks_seen(const tile::Score<config.features>& score, tile::TileRange loaded,
                                                       int q_begin, Attempt attempt) {
    constexpr Features features = config.features;
    constexpr int block_kv = config.block_kv;
    if constexpr (Shape<config>::from_diagonal) return blocks_from_diagonal(score, loaded, q_begin, attempt);
    tile::TileRange range = score.template key_tiles<wg_rows, block_kv>(q_begin);
    if constexpr (config.split_keys)
      range = {tile::max(range.begin, loaded.begin), tile::max(tile::min(range.end, loaded.end), loaded.begin)};
    if (range.begin == range.end) {  // one block that the mask hides
      ptx::path<"forward/sm90 warpgroup without keys">();
      range = {loaded.begin, loaded.begin + 1};
    }
    int first = range.begin;  // the interior, clipped to the range
    int last = score.visible_kv;
    if constexpr (features.window_right) last = tile::min(last, score.window_end(q_begin));
    last = tile::min(tile::max(last, 0) / block_kv, range.end);
    if constexpr (features.left_padding) first = tile::max(first, tile::ceil_div(score.first_kv, block_kv));
    if constexpr (features.window_left) {
      const int q_last = tile::min(q_begin + wg_rows, score.len_q) - 1;
      first = tile::max(first, tile::ceil_div(tile::max(score.window_begin(q_last), 0), block_kv));
    }
    // With the running maximum every block is an edge.
    if (features.mask || attempt != Attempt::fixed_max || first >= last)
      first = last = Shape<config>::forwards ? range.end : range.begin;
    if constexpr (Shape<config>::forwards) {
      return {range.begin - loaded.begin, first - loaded.begin, last - loaded.begin, range.end - loaded.begin};
    } else {
      return {loaded.end - range.end, loaded.end - last, loaded.end - first, loaded.end - range.begin};
    }
  }
};

}  // namespace flash_attention::forward_sm90
