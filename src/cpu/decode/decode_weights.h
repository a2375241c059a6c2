#pragma once

// From the scores of a tile to the weights of its values, with scores in rows. Some rows are processed together.

#include "cpu/decode/decode_products.h"
#include "cpu/decode/decode_scores.h"
#include "cpu/prefill/prefill.h"
#include "cpu/tile/narrow.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_lanes = round_up(smaller(plan::cpu_decode_rows, block_q), vector_lanes);
constexpr int decode_stack = plan::cpu_decode_stack;

/// The number of rows that the products process.
inline int padded_rows(const RowBlock& block) { return plan::cpu_decode_padded(block.rows); }

struct DecodeScratch {
  alignas(64) float Q[decode_stack * max_head_dim];
  alignas(64) float Q_raw[decode_stack * max_head_dim / 2];
  alignas(64) float O[decode_stack * max_head_dim];
  alignas(64) float S[decode_lanes * block_kv];  // [row][key]
  alignas(64) float keep[block_kv * decode_lanes];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float gathered[2][block_kv * max_head_dim];  // rows of K and of V from several pages
  alignas(64) float rescale[block_q];
  DecodeHead heads[decode_stack];
};

/// Computes P in place for some rows, over whole vectors: numbers past the keys become 0. Statistics are updated.
template <int rows>
inline void softmax_rows(int row, int keys, Statistics& statistics, DecodeScratch& scratch) {
  float* S = scratch.S + row * block_kv;
  const int padded = round_up(keys, vector_lanes);
  Vec largest[rows], sum[rows] = {};
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    for (int key = keys; key < padded; ++key) S[r * block_kv + key] = -infinity;
    largest[r] = splat(-infinity);
    for (int key = 0; key < padded; key += vector_lanes) {
      largest[r] = max(load(S + r * block_kv + key), largest[r]);
    }
  }
  const Vec old_max = load_some<Float32>(statistics.row_max + row, rows);
  const Vec row_max = max(reduce_each<Largest>(largest), old_max);
  const Vec origin = select(row_max == -infinity, Vec{}, row_max);
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    for (int key = 0; key < padded; key += vector_lanes) {
      const Vec p = exp2(load(S + r * block_kv + key) - origin[r]);
      store(S + r * block_kv + key, p);
      sum[r] += p;
    }
  }
  const Vec factor = exp2(old_max - origin);
  const Vec row_sum = load_some<Float32>(statistics.row_sum + row, rows) * factor + reduce_each<Sum>(sum);
  store_some<Float32>(scratch.rescale + row, factor, rows);
  store_some<Float32>(statistics.row_max + row, row_max, rows);
  store_some<Float32>(statistics.row_sum + row, row_sum, rows);
}

/// Multiplies scores, or probabilities, by the scales of the keys. 0 stays 0, because a hidden key's scale may be NaN.
inline void scale_keys(const Call& call, const RowBlock& block, const Tile& tile, const ScaleView& scales, float* S) {
  alignas(64) float factor[block_kv + vector_lanes] = {};
  for (int key = 0; key < tile.count; ++key) factor[key] = scale_of_key(call, block, scales, tile.begin + key);
  for (int row = 0; row < block.rows; ++row, S += block_kv) {
    change_row(S, tile.count, [&](int key, Vec s) { return select(s == 0.0f, s, s * load(factor + key)); });
  }
}

/// Turns scores in scratch.S into the weights of the values.
inline void exponentiate_keys(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head,
                              DecodeScratch& scratch) {
  if (call.token_scales) scale_keys(call, block, tile, call.k_scale, scratch.S);
  finish_scores_in_rows(call, block, tile, scratch.S);
  for_row_groups<4>(padded_rows(block),
                    [&]<int group>(int row) { softmax_rows<group>(row, tile.count, head.statistics, scratch); });
  if (call.dropout) {
    dropout_factors(call, block, tile, scratch.keep);
    for (int row = 0; row < block.rows; ++row) {
      for (int key = 0; key < tile.count; ++key) scratch.S[row * block_kv + key] *= scratch.keep[key * block.lanes() + row];
    }
  }
  if (call.token_scales) scale_keys(call, block, tile, call.v_scale, scratch.S);
}

}  // namespace
}  // namespace flash_attention::cpu
