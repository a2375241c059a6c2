#pragma once

// The scores of a tile and their tangents, for forward mode and second derivatives. docs/numerics.md has the formulas:
//
//     S = scale K Qt          S. = derivative * scale (K Q.t + K. Qt) + bias.         [keys][lanes], a query a lane

#include "cpu/tile/hidden.h"
#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

/// Rows of K. and V. of a tile. No data if they are 0.
struct KeyTangents {
  FloatRows K{nullptr, 0}, V{nullptr, 0};

  template <class Scratch>
  KeyTangents(const Call& call, const RowBlock& block, const Tile& tile, Scratch& scratch) {
    if (call.k_tangent.data != nullptr)
      K = key_rows(call, block, call.k_tangent, tile.begin, tile.count, call.head_dim, false, scratch.K_tangent);
    if (call.v_tangent.data != nullptr)
      V = key_rows(call, block, call.v_tangent, tile.begin, tile.count, call.head_dim_v, false, scratch.V_tangent);
  }
};

struct ScoreTangents {
  alignas(64) float S[block_kv * block_q];  // in units of log2(e); hidden scores are -inf
  // of the score that enters the softmax, not of S; hidden scores have 0
  alignas(64) float tangent[block_kv * block_q];
  alignas(64) float derivative[block_kv * block_q];  // of the soft cap
  alignas(64) float slope[block_kv * block_q];       // of the program

  /// Qt [head_dim][lanes] holds query_factor * Q, Qt_tangent holds query_factor * tangent of Q. raw, second: null, or
  /// memory for the tangent of the score before the soft cap, and for the cap's second derivative.
  void compute(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows K_tangent, const float* Qt,
               const float* Qt_tangent, NextTile* next, float* raw = nullptr, float* second = nullptr) {
    score_tile(call, block, tile, K, Qt, S, {.first = derivative, .second = second}, next, {.slope = slope});
    multiply_tangents(call, block, tile, K, K_tangent, Qt, Qt_tangent);
    const int size = tile.count * block.lanes();
    const bool capped = call.softcap > 0;
    const float factor = capped ? call.softcap : ln_2;  // query_factor without the scale
    for (int i = 0; i < size; i += vector_lanes) {
      Vec value = load(tangent + i) * factor;
      if (raw != nullptr) store(raw + i, value);
      if (capped) value *= load(derivative + i);
      store(tangent + i, value);
    }
    if (call.bias_tangent.data != nullptr) {
      for_each_bias(call.bias_tangent, block, tile, tangent, [](float* to, Vec bias) { store(to, load(to) + bias); });
    }
    if (call.has_score_program()) {
      for (int i = 0; i < size; i += vector_lanes) store(tangent + i, load(tangent + i) * load(slope + i));
    }
    if (tile.weighted) return;
    for (int i = 0; i < size; i += vector_lanes) {  // a hidden score may have NaN here
      const auto seen = load(S + i) == -infinity;
      store(tangent + i, select(seen, Vec{}, load(tangent + i)));
      if (raw != nullptr) store(raw + i, select(seen, Vec{}, load(raw + i)));
    }
  }

 private:
  void multiply_tangents(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows K_tangent,
                         const float* Qt, const float* Qt_tangent) {
    const bool of_queries = call.q_tangent.data != nullptr, of_keys = K_tangent.data != nullptr;
    if (!of_queries && !of_keys) {
      for (int i = 0; i < tile.count * block.lanes(); i += vector_lanes) store(tangent + i, Vec{});
      return;
    }
    const int step = diagonal_step(tile);
    for (int key = 0; key < tile.count; key += step) {
      const int count = smaller(tile.count - key, step);
      if (of_queries) multiply_keys(block, tile, key, count, K, Qt_tangent, call.head_dim, tangent);
      if (of_queries && of_keys) multiply_keys<Start::add>(block, tile, key, count, K_tangent, Qt, call.head_dim, tangent);
      if (!of_queries) multiply_keys(block, tile, key, count, K_tangent, Qt, call.head_dim, tangent);
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
