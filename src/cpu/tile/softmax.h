#pragma once

// The online softmax of a block of rows, a row a lane, and the end of a row.

#include "cpu/tile/dropout.h"
#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

/// Over the keys so far: the largest score, and the sum of 2^(score - row_max).
struct Statistics {
  alignas(64) float row_max[block_q];
  alignas(64) float row_sum[block_q];
  alignas(64) float row_moment[block_q];  // sum of 2^(score - row_max) (score - row_max), for the entropy

  void reset() {
    for (int lane = 0; lane < block_q; ++lane) row_max[lane] = -infinity, row_sum[lane] = row_moment[lane] = 0;
  }
};

/// P = 2^(S - row_max) in place. Sums over earlier keys must be multiplied by rescale[lane].
template <int vectors, bool moments>
inline void softmax_tile_of(int keys, float* S, Statistics& statistics, float* rescale) {
  Vec old_max[vectors], row_max[vectors], origin[vectors], sum[vectors], moment[vectors];
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vectors; ++v) old_max[v] = row_max[v] = load(statistics.row_max + v * vector_lanes);
  for (int key = 0; key < keys; ++key) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) row_max[v] = max(load(S + (key * vectors + v) * vector_lanes), row_max[v]);
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vectors; ++v) {
    origin[v] = select(row_max[v] == -infinity, Vec{}, row_max[v]);  // nothing seen yet: -inf - -inf would be NaN
    sum[v] = moment[v] = Vec{};
  }
  for (int key = 0; key < keys; ++key) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) {
      float* s = S + (key * vectors + v) * vector_lanes;
      const Vec x = load(s) - origin[v], p = exp2(x);
      store(s, p);
      sum[v] += p;
      if constexpr (moments) moment[v] += select(x == -infinity, Vec{}, p * x);
    }
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < vectors; ++v) {
    const Vec factor = exp2(old_max[v] - origin[v]);
    store(rescale + v * vector_lanes, factor);
    store(statistics.row_max + v * vector_lanes, row_max[v]);
    if constexpr (moments) {  // terms relative to the old maximum become relative to the new one
      const Vec step = select(old_max[v] == -infinity, Vec{}, old_max[v] - origin[v]);
      const Vec old_sum = load(statistics.row_sum + v * vector_lanes);
      const Vec before = load(statistics.row_moment + v * vector_lanes) + old_sum * step;
      store(statistics.row_moment + v * vector_lanes, before * factor + moment[v]);
    }
    store(statistics.row_sum + v * vector_lanes, load(statistics.row_sum + v * vector_lanes) * factor + sum[v]);
  }
}

template <bool moments = false>
inline void softmax_tile(const RowBlock& block, int keys, float* S, Statistics& statistics, float* rescale) {
  switch (block.vectors) {
    case 1:
      return softmax_tile_of<1, moments>(keys, S, statistics, rescale);
    case 2:
      return softmax_tile_of<2, moments>(keys, S, statistics, rescale);
    default:
      return softmax_tile_of<block_vectors, moments>(keys, S, statistics, rescale);
  }
}

/// P *= keep.
inline void apply_dropout(const Call& call, const RowBlock& block, const Tile& tile, float* P, float* keep) {
  dropout_factors(call, block, tile, keep);
  for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) store(P + i, load(P + i) * load(keep + i));
}

struct RowResult {
  float factor;  // out = factor * sum of P V
  float lse;     // natural logarithm
  float above;   // lse minus the largest score
};

/// Ends a row: adds the sink to the sum. A row that sees nothing gets 0 and -inf.
inline RowResult finish_row(const Call& call, const RowBlock& block, int lane, float row_max, float row_sum) {
  float scale = 1, above = 0;
  if (call.sink != nullptr && !block.unused[lane]) {
    const float sink = call.sink[block.head[lane]] * log2_e;
    const float total_max = sink > row_max ? sink : row_max;
    // No key and no sink: -inf - -inf would be NaN. A sum of NaN is due to a key that is NaN.
    if (total_max == -infinity && row_sum == 0.0f) return {0.0f, -infinity, 0.0f};
    above = total_max - row_max;
    scale = exp2_one(row_max - total_max);
    row_sum = row_sum * scale + exp2_one(sink - total_max);
    row_max = total_max;
  }
  if (row_sum == 0.0f) return {0.0f, -infinity, 0.0f};
  const float log_sum = __builtin_log2f(row_sum);
  return {scale / row_sum, (row_max + log_sum) * ln_2, (above + log_sum) * ln_2};
}

/// Raises the largest score of a sequence and head, which threads share. NaN stays.
inline void raise(float* largest, float value) {
  float known;
  __atomic_load(largest, &known, __ATOMIC_RELAXED);
  while (!(known != known) && !(value <= known) &&
         !__atomic_compare_exchange(largest, &known, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

/// Writes the statistics of a finished row: its sum and moment are relative to row_max, lse includes the sink.
inline void write_statistics(const Call& call, const RowBlock& block, int lane, float row_max, float row_sum,
                             float row_moment, const RowResult& result) {
  if (call.max_logit != nullptr && !block.unused[lane]) {
    const float largest = row_sum == row_sum ? row_max * ln_2 : row_sum;  // the sum shows a score of NaN
    raise(call.max_logit + block.batch * call.heads_q + block.head[lane], largest);
  }
  if (call.entropy == nullptr) return;
  // sum of p (lse - score), with p = 2^(score - row_max) * factor
  const float entropy = result.factor * (row_sum * result.above - row_moment * ln_2);
  call.entropy[block.row_idx(call, lane)] = row_sum == 0.0f ? 0 : entropy;
}

}  // namespace
}  // namespace flash_attention::cpu
