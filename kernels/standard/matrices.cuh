#pragma once

#include "tile/product.cuh"
#include "tile/score.cuh"
#include "tile/workspace.cuh"

// The score matrices that standard attention keeps in memory: [batch, heads_q, seq_q, seq_kv], both sequence axes rounded
// up to whole tiles so that no access needs a bound. A block of 256 threads moves tiles of 64 x 64.

namespace flash_attention::standard {

using namespace abi;

/// A dropped probability is stored as -0. No other probability is -0.
constexpr float dropped = -0.0f;
__device__ __forceinline__ bool is_dropped(float p) {
  return __builtin_bit_cast(unsigned, p) == __builtin_bit_cast(unsigned, dropped);
}

/// The matrix of one sequence and head.
template <typename Element>
struct ScoreMatrix {
  Element* data;
  long long pitch;

  __device__ __forceinline__ ScoreMatrix(const AttentionArgs& args, StandardRegion which, int batch_idx, int head_idx)
      : pitch(tile::round_up(args.seq_kv, tile::block_rows)) {
    const long long plane = static_cast<long long>(batch_idx) * args.heads_q + head_idx;
    data = tile::workspace<Element>(args, which) + plane * tile::round_up(args.seq_q, tile::block_rows) * pitch;
  }

  __device__ __forceinline__ Element* row(int i) const { return data + i * pitch; }

  /// The thread's part of a tile.
  __device__ __forceinline__ void store(int q_begin, int kv_begin, const float (&values)[4][4]) const {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const tile::Four four{{values[r][0], values[r][1], values[r][2], values[r][3]}};
      tile::store_four(row(q_begin + place.row + r) + kv_begin + place.column, four, true);
    }
  }

  /// Loads the thread's part of a tile. Hidden elements are marked, so that they are skipped instead of multiplied by
  /// zero. With `skips_dropped`, dropped elements are marked, too.
  template <Features features>
  __device__ __forceinline__ void load(float (&values)[4][4], const tile::Visibility<features>& sight, int q_begin,
                                       int kv_begin, bool some_hidden, bool skips_dropped) const {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = q_begin + place.row + r, j = kv_begin + place.column;
      const tile::Four four = tile::load_four(row(i) + j, true);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool hidden = (some_hidden && !sight.visible(i, j + c)) || (skips_dropped && is_dropped(four[c]));
        values[r][c] = hidden ? tile::hidden() : four[c];
      }
    }
  }
};

template <int dim>
struct TileStorage {
  tile::ProductStorage<dim> product;
  tile::WeightTile weights;
};

/// The tile of the score matrices that a block of a one-dimensional grid works on.
struct ScoreTile {
  int q_begin;
  int kv_begin;
  int head_idx;
  int batch_idx;
};

__device__ __forceinline__ ScoreTile score_tile(const AttentionArgs& args) {
  const int num_kv_tiles = tile::ceil_div(args.seq_kv, tile::block_rows);
  const auto rest =
      tile::query_block(blockIdx.x / num_kv_tiles, tile::ceil_div(args.seq_q, tile::block_rows), args.heads_q);
  return {rest.tile_idx * tile::block_rows, static_cast<int>(blockIdx.x) % num_kv_tiles * tile::block_rows, rest.head_idx,
          rest.batch_idx};
}

/// Whether a tile has a score that is hidden or a row that does not exist.
template <Features features>
__device__ __forceinline__ bool some_hidden(const tile::Visibility<features>& sight, int q_begin, int kv_begin) {
  constexpr int block = tile::block_rows;
  return q_begin + block > sight.len_q || !sight.template all_visible<block, block>(q_begin, kv_begin);
}

/// Combines the values of the 32 lanes of a warp.
template <typename Combine>
__device__ __forceinline__ float reduce_warp(float value, Combine combine) {
#pragma unroll
  for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2) value = combine(value, ptx::shuffle_xor(value, lane_mask));
  return value;
}

}  // namespace flash_attention::standard
