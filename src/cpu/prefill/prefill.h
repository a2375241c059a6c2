#pragma once

// Forward for many queries: flash attention with a query in each SIMD lane.
//
//     Qt = scale * Q^T of 48 queries                       packed once: [head_dim][48]
//     for each tile of 64 keys that some query sees:
//         S = K Qt;  softcap, bias, ALiBi, mask            [64][48], stays in L1
//         P = 2^(S - row_max), row_sum, rescale            one query a lane, so no reduction across a vector
//         Ot = rescale * Ot + V^T P                        [head_dim_v][48]
//     out = Ot^T / row_sum
//
// Both products broadcast elements of K and V in the order of memory, so neither is transposed. If the rows of a head
// are far apart or not float, a first step copies them (copy_keys).

#include "cpu/tile/dropout.h"
#include "cpu/tile/hidden.h"
#include "cpu/tile/partial.h"

namespace flash_attention::cpu {
namespace {

/// The state of a block of rows while the loop goes over the keys.
struct PrefillRows {
  alignas(64) float Qt[max_head_dim * block_q];
  alignas(64) float Ot[max_head_dim * block_q];
  Statistics statistics;
  bool started;  // Ot holds sums

  void start(const Call& call, const RowBlock& block, float* buffer) {
    gather_queries(call, block, query_factor(call), buffer, Qt);
    statistics.reset();
    started = false;
  }
};

static_assert(block_q <= block_kv);

struct PrefillScratch {
  PrefillRows rows[max_blocks];
  alignas(64) float S[block_kv * block_q];
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float K[block_kv * max_head_dim];  // first Q, before it is spread over lanes
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
};

/// For a block whose keys are one tile: O[row] = sum of P[key][row] * V[key], directly in rows instead of lanes.
/// columns: whole vectors.
inline void values_in_rows(const RowBlock& block, const Tile& tile, FloatRows V, int columns, const float* P, float* O,
                           float* buffer) {
  const SafeRows safe = make_safe(V, tile.count, columns, tile.weighted, buffer);
  multiply<Start::zero, Order::column_major>({.A = P,
                                              .a_stride = block.lanes(),
                                              .B = safe.rows.data,
                                              .b_stride = safe.rows.stride,
                                              .C = O,
                                              .c_stride = columns,
                                              .rows = block.rows,
                                              .depth = tile.count,
                                              .vectors = columns / vector_lanes});
  add_nonfinite_rows(safe, P, {block.lanes(), 1}, block.rows, O, {columns, 1}, columns);
}

/// One tile of keys for one block.
inline void prefill_tile(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows V, bool in_rows,
                         PrefillRows& rows, PrefillScratch& scratch, NextTile& next) {
  score_tile(call, block, tile, K, rows.Qt, scratch.S, {}, &next);
  if (call.entropy != nullptr) {
    softmax_tile<true>(block, tile.count, scratch.S, rows.statistics, scratch.rescale);
  } else {
    softmax_tile(block, tile.count, scratch.S, rows.statistics, scratch.rescale);
  }
  if (call.dropout) apply_dropout(call, block, tile, scratch.S, scratch.keep);
  if (in_rows) {
    values_in_rows(block, tile, V, round_up(call.head_dim_v, vector_lanes), scratch.S, rows.Ot, scratch.safe);
  } else if (rows.started) {
    add_to_lanes<Start::rescale>(block, tile, V, call.head_dim_v, scratch.S, rows.Ot, scratch.safe, scratch.rescale);
  } else {
    add_to_lanes<Start::zero>(block, tile, V, call.head_dim_v, scratch.S, rows.Ot, scratch.safe);
  }
  rows.started = true;
}

inline void prefill(const Call& call, std::int64_t item_idx, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  const ForwardItem item(call, item_idx);
  BlockList blocks(call, item.batch, item.kv_head, item.first_block, 1);
  take_split(call, item.split, block_kv, blocks);
  const bool in_rows = !call.invariant && call.num_splits == 1 && blocks.key_end - blocks.key_begin <= block_kv;
  for (int b = 0; b < blocks.count; ++b) scratch.rows[b].start(call, blocks[b], scratch.K);
  for_tiles(call, blocks, in_rows, scratch, [&](int b, const Tile& tile, FloatRows K, FloatRows V, NextTile& next) {
    prefill_tile(call, blocks[b], tile, K, V, in_rows, scratch.rows[b], scratch, next);
  });
  for (int b = 0; b < blocks.count; ++b) {
    PrefillRows& rows = scratch.rows[b];
    if (!rows.started) {
      for (int i = 0; i < round_up(call.head_dim_v, vector_lanes) * blocks[b].lanes(); ++i) rows.Ot[i] = 0;
    }
    if (in_rows) {
      write_rows(call, blocks[b], item.split, rows.statistics, rows.Ot, round_up(call.head_dim_v, vector_lanes),
                 scratch.rescale);
    } else {
      write_block(call, blocks[b], item.split, rows.statistics, rows.Ot, scratch.rescale);
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
