#pragma once

// Forward mode in one pass: out, lse and their tangents, with a query in each SIMD lane as in forward:
//
//     for each tile of keys that some query of a block sees:
//         S, S.                                        score_tangents.h
//         P = 2^(S - row_max), rescale as in forward
//         moment = rescale * moment + sum of P S.
//         Ot = rescale * Ot + V^T P
//         At = rescale * At + V^T (P S.) + V.^T P
//     lse. = moment / row_sum,  out. = At^T / row_sum - lse. out
//
// Dropout's factors multiply P and P S. in their products with values.

#include "cpu/tangent/score_tangents.h"
#include "cpu/tile/partial.h"

namespace flash_attention::cpu {
namespace {

/// The state of a block of rows while the loop goes over the keys.
struct TangentRows {
  alignas(64) float Qt[max_head_dim * block_q];
  alignas(64) float Qt_tangent[max_head_dim * block_q];
  alignas(64) float Ot[max_head_dim * block_q];
  alignas(64) float At[max_head_dim * block_q];  // at the end the tangent of out
  alignas(64) float moment[block_q];             // sum of 2^(score - row_max) S.; at the end the tangent of lse
  alignas(64) float factor[block_q];             // at the end: out = factor * Ot
  alignas(64) float lse[block_q];                // at the end
  Statistics statistics;
  bool started;  // Ot and At hold sums

  void start(const Call& call, const RowBlock& block) {
    gather_rows(call, block, call.q, call.head_dim, query_factor(call), Qt);
    if (call.q_tangent.data != nullptr)
      gather_rows(call, block, call.q_tangent, call.head_dim, query_factor(call), Qt_tangent);
    statistics.reset();
    for (float& sum : moment) sum = 0;
    started = false;
  }

  /// Turns sums into out, lse and their tangents.
  void finish(const Call& call, const RowBlock& block) {
    if (!started) {
      for (int i = 0; i < call.head_dim_v * block.lanes(); ++i) Ot[i] = At[i] = 0;
    }
    for (int lane = 0; lane < block.lanes(); ++lane) {
      const RowResult row = finish_row(call, block, lane, statistics.row_max[lane], statistics.row_sum[lane]);
      factor[lane] = row.factor;
      lse[lane] = row.lse;
      moment[lane] = row.factor == 0.0f ? 0 : moment[lane] * row.factor;
      if (call.sink_tangent != nullptr && row.lse != -infinity) {
        moment[lane] += sink_share(call, block, lane) * call.sink_tangent[block.head[lane]];
      }
    }
    for (int c = 0; c < call.head_dim_v; ++c) {
      for (int v = 0; v < block.lanes(); v += vector_lanes) {
        float* a = At + c * block.lanes() + v;
        const Vec out = load(Ot + c * block.lanes() + v) * load(factor + v);
        store(a, load(a) * load(factor + v) - load(moment + v) * out);
      }
    }
  }

  /// The sink's share of a row.
  float sink_share(const Call& call, const RowBlock& block, int lane) const {
    if (block.unused[lane] || lse[lane] == -infinity) return 0;
    return exp2_one((call.sink[block.head[lane]] - lse[lane]) * log2_e);
  }
};

struct TangentScratch {
  TangentRows rows;
  ScoreTangents tile;
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float K_tangent[block_kv * max_head_dim];
  alignas(64) float V_tangent[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
};

/// S. becomes P S., which is also added to moment.
inline void add_moments(const RowBlock& block, int keys, const float* P, float* tangent, const float* rescale,
                        float* moment) {
  for (int v = 0; v < block.lanes(); v += vector_lanes) {
    Vec sum = load(moment + v) * load(rescale + v);
    for (int key = 0; key < keys; ++key) {
      const int i = key * block.lanes() + v;
      const Vec p = load(P + i), x = select(p == 0.0f, Vec{}, p * load(tangent + i));
      store(tangent + i, x);
      sum += x;
    }
    store(moment + v, sum);
  }
}

inline void tangent_tile(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows V,
                         TangentScratch& scratch, NextTile& next) {
  TangentRows& rows = scratch.rows;
  float *P = scratch.tile.S, *weighted = scratch.tile.tangent;
  const KeyTangents tangents(call, block, tile, scratch);
  scratch.tile.compute(call, block, tile, K, tangents.K, rows.Qt, rows.Qt_tangent, &next);
  softmax_tile(block, tile.count, P, rows.statistics, scratch.rescale);
  add_moments(block, tile.count, P, weighted, scratch.rescale, rows.moment);
  if (call.dropout) {
    apply_dropout(call, block, tile, P, scratch.keep);
    for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) {
      const Vec kept = load(scratch.keep + i);
      store(weighted + i, select(kept == 0.0f, Vec{}, load(weighted + i) * kept));
    }
  }
  const auto add = [&](const float* W, float* sums) {
    if (rows.started) {
      add_to_lanes<Start::rescale>(block, tile, V, call.head_dim_v, W, sums, scratch.safe, scratch.rescale);
    } else {
      add_to_lanes<Start::zero>(block, tile, V, call.head_dim_v, W, sums, scratch.safe);
    }
  };
  add(P, rows.Ot);
  add(weighted, rows.At);
  if (tangents.V.data != nullptr) {
    add_to_lanes<Start::add>(block, tile, tangents.V, call.head_dim_v, P, rows.At, scratch.safe);
  }
  rows.started = true;
}

inline std::int64_t tangent_items(const Call& call) { return call.batch * call.heads_kv * blocks_per_head(call); }

/// Processes the rows of one item in scratch.rows, from queries to results. Later blocks come first: under a causal
/// mask they see more keys.
inline BlockList tangents_of_rows(const Call& call, std::int64_t item, TangentScratch& scratch) {
  const std::int64_t block = blocks_per_head(call) - 1 - item % blocks_per_head(call);
  item /= blocks_per_head(call);
  const BlockList blocks(call, item / call.heads_kv, static_cast<int>(item % call.heads_kv), block, 1);
  if (blocks.count == 0) return blocks;
  scratch.rows.start(call, blocks[0]);
  for_tiles(call, blocks, false, scratch, [&](int, const Tile& tile, FloatRows K, FloatRows V, NextTile& next) {
    tangent_tile(call, blocks[0], tile, K, V, scratch, next);
  });
  scratch.rows.finish(call, blocks[0]);
  return blocks;
}

/// Writes the tangents of out and lse, from finished rows.
inline void write_tangents(const Call& call, const RowBlock& block, const TangentRows& rows) {
  alignas(64) float ones[block_q];
  for (float& one : ones) one = 1;
  if (call.out_tangent.data != nullptr) scatter_rows(call, block, rows.At, call.head_dim_v, ones, call.out_tangent);
  for (int lane = 0; call.lse_tangent != nullptr && lane < block.rows; ++lane) {
    call.lse_tangent[block.row_idx(call, lane)] = rows.moment[lane];
  }
}

inline void tangent(const Call& call, std::int64_t item, void* memory) {
  TangentScratch& scratch = *static_cast<TangentScratch*>(memory);
  const BlockList blocks = tangents_of_rows(call, item, scratch);
  if (blocks.count == 0) return;
  const RowBlock& block = blocks[0];
  write_tangents(call, block, scratch.rows);
  scatter_rows(call, block, scratch.rows.Ot, call.head_dim_v, scratch.rows.factor, call.out);
  for (int lane = 0; lane < block.rows; ++lane) write_lse(call, block, lane, scratch.rows.lse[lane]);
}

}  // namespace
}  // namespace flash_attention::cpu
