#pragma once

// Backward over listed keys, in five products a tile as in backward.h. An item is a key head and every num_splits-th of
// its lists, with its own sums for dK and dV (CpuRegion::key_gradients). Rows of a tile's keys are added to them one by
// one, in the order of the list, so a key that is in a list twice gets both terms. The second step adds the splits in
// order, so every run has the same result.

#include "cpu/backward/backward.h"
#include "cpu/listed/forward.h"

namespace flash_attention::cpu {
namespace {

/// P and dS of a tile of listed keys.
inline void listed_gradients(const Call& call, const RowBlock& block, const Tile& tile, const std::int32_t* keys,
                             const ListedTile& gathered, const GradientRows& rows, GradientTile& gradients) {
  multiply_keys(block, tile, 0, tile.count, gathered.K, rows.Qt, call.head_dim, gradients.P);
  finish_listed(call, block, keys, tile.count, gradients.P, gradients.derivative);
  multiply_keys(block, tile, 0, tile.count, gathered.V, rows.dOt, call.head_dim_v, gradients.dS);
  if (call.dropout) listed_dropout(call, block, keys, tile.count, gradients.keep);
  const int lanes = block.lanes();
  for (int n = 0; n < tile.count; ++n) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      const int i = n * lanes + v;
      const Vec kept = call.dropout ? load(gradients.keep + i) : splat(1.0f);
      const ScoreGradient gradient(load(gradients.P + i), load(gradients.dS + i), kept, load(rows.lse + v),
                                   load(rows.delta + v));
      store(gradients.P + i, gradient.p);
      store(gradients.dS + i, gradient.ds);
    }
  }
}

/// Adds rows to the sums of a tile's keys. sum_of returns the row of a key.
template <class SumOf>
inline void scatter_keys(const std::int32_t* keys, int count, const float* from, int columns, SumOf sum_of) {
  const int stride = round_up(columns, vector_lanes);
  for (int n = 0; n < count; ++n) {
    float* const to = sum_of(keys[n]);
    for (int c = 0; c < stride; c += vector_lanes) store(to + c, load(to + c) + load(from + n * stride + c));
  }
}

inline void backward_list(const Call& call, const ListBlock& block, const KeyGradients& sums, BackwardScratch& scratch) {
  BackwardRows& rows = scratch.rows[0];
  start_rows(call, block.rows, rows);
  if (call.dsink != nullptr) write_sink_terms(call, block.rows, rows.lanes);
  ListedKeys listed(call, block);
  std::int32_t keys[block_kv];
  for (int count = listed.next(keys); count > 0; count = listed.next(keys)) {
    const ListedTile gathered = gather_tile(call, block.rows, keys, count, scratch.K, scratch.V, scratch.safe);
    const Tile tile(count);
    listed_gradients(call, block.rows, tile, keys, gathered, rows.lanes, scratch.tile);
    const auto add = [&](const float* weights, const float* of_rows, int columns, auto sum_of) {
      const int stride = round_up(columns, vector_lanes);
      float* const part = scratch.sums.data;
      for (int i = 0; i < count * stride; ++i) part[i] = 0;
      add_to_keys(block.rows, tile, weights, of_rows, columns, part, stride, scratch.safe);
      scatter_keys(keys, count, part, columns, sum_of);
    };
    add(scratch.tile.P, rows.dO, call.head_dim_v, [&](std::int64_t key) { return sums.dV(key); });
    scratch.tile.through_softcap(call, count * block.rows.lanes());
    add(scratch.tile.dS, rows.Q, call.head_dim, [&](std::int64_t key) { return sums.dK(key); });
    add_to_lanes<Start::add>(block.rows, tile, gathered.K, call.head_dim, scratch.tile.dS, rows.dQt, scratch.safe);
  }
  for (int lane = 0; lane < block.rows.lanes(); ++lane) scratch.factor[lane] = call.scale;
  scatter_rows(call, block.rows, rows.dQt, call.head_dim, scratch.factor, call.dq);
}

inline void backward_listed(const Call& call, std::int64_t item, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  const KeyItem at(call, item);
  const ListShape shape(call);
  const KeyGradients sums(call, at.split, at.batch, at.kv_head);
  sums.clear(round_up(static_cast<int>(Sequence(call, at.batch).kv_rows), plan::cpu_key_unit));
  const int units = shape.units / call.heads_kv;  // of the key head
  for (std::int64_t row = at.split; row < list_rows(call); row += call.num_splits) {
    for (int n = 0; n < units; ++n) {
      for (std::int64_t chunk = 0; chunk < list_chunks(call, shape); ++chunk) {
        const ListBlock block(call, shape, at.batch, at.kv_head * units + n, row, chunk);
        if (block.rows.rows > 0) backward_list(call, block, sums, scratch);
      }
    }
  }
}

inline std::int64_t finish_listed_items(const Call& call) {
  return call.batch * call.heads_kv * ceil_div(call.seq_kv, finish_keys);
}

}  // namespace
}  // namespace flash_attention::cpu
