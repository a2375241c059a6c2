#pragma once

// Which tiles a block works on, in which order, and which keys each of them sees. The loading warp works this out and hands
// it to the warpgroups that attend, together with Q.

#include "forward/sm90_shape.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

/// The tiles of this block. A block takes every gridDim-th row tile, neighbours in the same head, so that L2 holds its
/// keys. With pair_tiles it takes row tile `last - x` and then row tile x: under a causal mask every pair is the same work.
template <ForwardConfig config>
struct Schedule {
  const AttentionArgs& args;
  int units_per_head;  // row tiles, or pairs of them
  int num_units;
  int num_iterations;

  __device__ __forceinline__ explicit Schedule(const AttentionArgs& arguments) : args(arguments) {
    const int row_tiles = tile::ceil_div(args.seq_q, config.block_q);
    units_per_head = config.pair_tiles ? tile::ceil_div(row_tiles, 2) : row_tiles;
    num_units = units_per_head * args.heads_q * args.batch;
    const int mine = tile::ceil_div(num_units - static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    num_iterations = config.pair_tiles ? 2 * mine : mine;
  }

  __device__ __forceinline__ Tile tile_at(int iteration, Pass pass) const {
    const int unit =
        static_cast<int>(blockIdx.x) + (config.pair_tiles ? iteration / 2 : iteration) * static_cast<int>(gridDim.x);
    const int head_of_batch = unit / units_per_head;
    const int position = unit - head_of_batch * units_per_head;
    const int batch_idx = head_of_batch / args.heads_q;

    Tile tile{.iteration = iteration, .pass = pass};
    tile.head_idx = head_of_batch - batch_idx * args.heads_q;
    tile.sequence = tile::make_sequence<config.features>(args, batch_idx);
    int row_tile = position;
    tile.exists = true;
    if constexpr (config.pair_tiles) {
      const int last = tile::ceil_div(tile.sequence.rows_q, config.block_q) - 1;
      const bool second = iteration % 2 != 0;
      row_tile = second ? position : last - position;
      tile.exists = second ? position < last - position : position <= last - position;
    }
    tile.q_begin = row_tile * config.block_q;
    tile.exists = tile.exists && tile.q_begin < tile.sequence.rows_q;
    find_blocks(tile, pass);
    return tile;
  }

  __device__ __forceinline__ void find_blocks(Tile& tile, Pass pass) const {
    constexpr Features features = config.features;
    constexpr int block_kv = config.block_kv;
    const tile::Score<features> score(args, tile.sequence, tile.head_idx);
    const tile::TileRange range = score.template key_tiles<config.block_q, block_kv>(tile.q_begin);
    tile.begin = range.begin;
    tile.end = range.end;

    int first = tile.begin;  // the interior, clipped to the range
    int last = score.visible_kv;
    if constexpr (features.window_right) last = tile::smaller(last, tile.q_begin + score.diagonal + score.window_right + 1);
    last = tile::larger(last, 0) / block_kv;
    if constexpr (features.window_left) {
      const int q_last = tile::smaller(tile.q_begin + config.block_q, score.len_q) - 1;
      first = tile::larger(first, tile::ceil_div(tile::larger(q_last + score.diagonal - score.window_left, 0), block_kv));
    }
    // With the running maximum every block is an edge.
    const bool none = features.mask || pass != Pass::reference || first >= last;
    tile.interior_begin = none ? tile.begin : first;
    tile.interior_end = none ? tile.begin : last;
  }
};

}  // namespace flash_attention::forward_sm90
