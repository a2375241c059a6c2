#pragma once

// The gradient of a bias: dS summed over the axes that the bias is broadcast along. Each item owns a tile of dbias and
// computes dS again for every head and batch entry that adds to it, in order: no atomics, no memory beyond the tile.

#include "cpu/backward/gradient.h"

namespace flash_attention::cpu {
namespace {

struct DbiasScratch {
  GradientRows rows;
  GradientTile tile;
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float sum[block_kv * block_q];

  /// The gradient of the scores of a tile.
  const float* score_gradient(const Call& call, const RowBlock& block, const Tile& at) {
    rows.load_rows(call, block);
    const FloatRows keys = key_rows(call, block, call.k, at.begin, at.count, call.head_dim, false, K);
    const FloatRows values = key_rows(call, block, call.v, at.begin, at.count, call.head_dim_v, false, V);
    tile.compute(call, block, at, rows, keys, values);
    return tile.dS;
  }
};

/// The extents of dbias in tiles. An axis of stride 0 has extent 1.
struct DbiasGrid {
  std::int64_t batch, heads, blocks, tiles;

  explicit DbiasGrid(const Call& call)
      : batch(call.dbias.batch_stride != 0 ? call.batch : 1),
        heads(call.dbias.head_stride != 0 ? call.heads_q : 1),
        blocks(call.dbias.q_stride != 0 ? ceil_div(call.seq_q, block_q) : 1),
        tiles(ceil_div(call.seq_kv, block_kv)) {}
};

inline std::int64_t dbias_items(const Call& call) {
  const DbiasGrid grid(call);
  return call.dbias.data == nullptr ? 0 : grid.batch * grid.heads * grid.blocks * grid.tiles;
}

/// Adds dS of one block of rows of one head to sum[key][lane].
template <class Scratch>
inline void add_bias_gradient(const Call& call, std::int64_t batch, int head, std::int64_t row_block, std::int64_t begin,
                              Scratch& scratch) {
  RowBlock block(call, batch, head, 1, row_block * block_q);
  if (block.rows == 0 || block.key_begin >= begin + block_kv || block.key_end <= begin) return;
  const Tile tile(call, block, begin);
  if (tile.seen == Seen::none) return;
  const float* dS = scratch.score_gradient(call, block, tile);
  for (int key = 0; key < tile.count; ++key) {
    for (int lane = 0; lane < block.rows; ++lane) {
      scratch.sum[key * block_q + lane] += dS[key * block.lanes() + lane];
    }
  }
}

/// `memory` is a DbiasScratch, or as much memory of another pass.
template <class Scratch = DbiasScratch>
inline void dbias(const Call& call, std::int64_t item, void* memory) {
  Scratch& scratch = *static_cast<Scratch*>(memory);
  const DbiasGrid grid(call);
  const std::int64_t begin = item % grid.tiles * block_kv;
  const std::int64_t block = item / grid.tiles % grid.blocks;
  const std::int64_t head = item / grid.tiles / grid.blocks % grid.heads;
  const std::int64_t batch = item / grid.tiles / grid.blocks / grid.heads;
  const bool all_queries = call.dbias.q_stride == 0;

  for (float& sum : scratch.sum) sum = 0;
  for (std::int64_t b = grid.batch == 1 ? 0 : batch; b < (grid.batch == 1 ? call.batch : batch + 1); ++b) {
    for (std::int64_t h = grid.heads == 1 ? 0 : head; h < (grid.heads == 1 ? call.heads_q : head + 1); ++h) {
      const std::int64_t blocks = ceil_div(call.seq_q, block_q);
      for (std::int64_t r = all_queries ? 0 : block; r < (all_queries ? blocks : block + 1); ++r) {
        add_bias_gradient(call, b, static_cast<int>(h), r, begin, scratch);
      }
    }
  }

  const int keys = static_cast<int>(smaller<std::int64_t>(block_kv, call.seq_kv - begin));
  const int rows = all_queries ? 1 : static_cast<int>(smaller<std::int64_t>(block_q, call.seq_q - block * block_q));
  with_any_element(call.dbias.dtype, [&](auto type) {
    using T = decltype(type);
    for (int row = 0; row < rows; ++row) {
      auto* to = reinterpret_cast<typename T::Stored*>(call.dbias.data) + batch * call.dbias.batch_stride +
                 head * call.dbias.head_stride + (block * block_q + row) * call.dbias.q_stride + begin;
      for (int key = 0; key < keys; ++key) {
        float sum = scratch.sum[key * block_q + row];
        for (int lane = 1; all_queries && lane < block_q; ++lane) sum += scratch.sum[key * block_q + lane];
        store_some<T>(to + key, splat(sum), 1);
      }
    }
  });
}

}  // namespace
}  // namespace flash_attention::cpu
