#pragma once

// Processes a tile of raw scores S[key][lane] before the softmax: softcap, bias, ALiBi, program and masks, in the order
// of docs/numerics.md. Scores are in units of log2(e), so that the softmax computes 2^x. A hidden score is -inf.

#include "cpu/tile/diagonal.h"
#include "cpu/tile/lanes.h"
#include "cpu/tile/math.h"
#include "cpu/tile/multiply.h"
#include "cpu/tile/tile.h"

namespace flash_attention::cpu {
namespace {

/// The factor of Q when it is packed: for the argument of softcap, or else for the score.
FLASH_ATTENTION_INLINE float query_factor(const Call& call) {
  return call.softcap > 0 ? call.scale / call.softcap : call.scale * log2_e;
}

/// Calls use(key, v, values) with values = row_of(lane)[key] of the keys of a tile, a vector of lanes each.
template <class T, class RowOf, class Use>
inline void for_each_score(const RowBlock& block, const Tile& tile, RowOf row_of, Use use) {
  for (int v = 0; v < block.vectors; ++v) {
    const typename T::Stored* rows[vector_lanes];
    for (int lane = 0; lane < vector_lanes; ++lane) rows[lane] = row_of(v * vector_lanes + lane) + tile.begin;
    Vec square[vector_lanes];
    int key = 0;
    for (; key + vector_lanes <= tile.count; key += vector_lanes) {
      FLASH_ATTENTION_UNROLL
      for (int lane = 0; lane < vector_lanes; ++lane) square[lane] = T::load(rows[lane] + key);
      transpose(square);
      FLASH_ATTENTION_UNROLL
      for (int j = 0; j < vector_lanes; ++j) use(key + j, v, square[j]);
    }
    if (key == tile.count) continue;
    for (int lane = 0; lane < vector_lanes; ++lane) square[lane] = load_some<T>(rows[lane] + key, tile.count - key);
    transpose(square);
    for (int j = 0; key + j < tile.count; ++j) use(key + j, v, square[j]);
  }
}

/// The derivatives of the capped score by the raw one. Each may be null.
struct CapTerms {
  float* first = nullptr;   // 1 - tanh^2
  float* second = nullptr;  // -2 tanh (1 - tanh^2) / softcap
};

/// S = softcap * tanh(S). Writes the derivatives that are requested.
inline void apply_softcap(const Call& call, int size, float* S, CapTerms terms) {
  for (int i = 0; i < size; i += vector_lanes) {
    const Vec t = tanh(load(S + i));
    store(S + i, t * (call.softcap * log2_e));
    const Vec slope = 1.0f - t * t;
    if (terms.first != nullptr) store(terms.first + i, slope);
    if (terms.second != nullptr) store(terms.second + i, t * slope * (-2.0f / call.softcap));
  }
}

/// Calls use(s, b) with a vector of S and the tensor's elements there. The tensor is a bias or its tangent.
template <class Use>
inline void for_each_bias(const ScoreView& tensor, const RowBlock& block, const Tile& tile, float* S, Use use) {
  with_any_element(tensor.dtype, [&](auto type) {
    using T = decltype(type);
    const auto row_of = [&](int lane) {
      return reinterpret_cast<const typename T::Stored*>(tensor.data) + block.batch * tensor.batch_stride +
             block.head[lane] * tensor.head_stride + block.query[lane] * tensor.q_stride;
    };
    for_each_score<T>(block, tile, row_of,
                      [&](int key, int v, Vec bias) { use(S + (key * block.vectors + v) * vector_lanes, bias); });
  });
}

inline void apply_bias(const Call& call, const RowBlock& block, const Tile& tile, float* S) {
  for_each_bias(call.bias, block, tile, S, [](float* s, Vec bias) { store(s, load(s) + scaled_bias(bias)); });
}

inline void apply_alibi(const Call& call, const RowBlock& block, const Tile& tile, float* S) {
  const std::int64_t shift = block.sequence.kv_used - block.sequence.q_used;
  for (int v = 0; v < block.vectors; ++v) {
    alignas(64) float slope[vector_lanes], position[vector_lanes];
    for (int lane = 0; lane < vector_lanes; ++lane) {
      const int l = v * vector_lanes + lane;
      slope[lane] = call.alibi_slopes[block.batch * call.alibi_batch_stride + block.head[l]] * log2_e;
      position[lane] = static_cast<float>(block.query[l] + shift - tile.begin);
    }
    for (int key = 0; key < tile.count; ++key) {
      float* s = S + (key * block.vectors + v) * vector_lanes;
      store(s, load(s) - load(slope) * absolute(load(position) - static_cast<float>(key)));
    }
  }
}

/// Hides scores outside of each lane's range of keys.
inline void apply_range(const RowBlock& block, const Tile& tile, float* S) {
  if (tile.begin >= block.full_begin && tile.begin + tile.count <= block.full_end) return;
  for (int v = 0; v < block.vectors; ++v) {
    const Int begin = load(block.begin + v * vector_lanes), end = load(block.end + v * vector_lanes);
    for (int key = 0; key < tile.count; ++key) {
      float* s = S + (key * block.vectors + v) * vector_lanes;
      const Int j = Int{} + static_cast<std::int32_t>(tile.begin + key);
      store(s, select((j >= begin) & (j < end), load(s), splat(-infinity)));
    }
  }
}

/// Hides scores that the masks hide.
inline void apply_mask(const RowBlock& block, const Tile& tile, float* S) {
  for (int first = 0; first < tile.count; first += 32) {
    const int keys = smaller(tile.count - first, 32);
    for (int v = 0; v < block.vectors; ++v) {
      const Uint bits = (Uint)load(reinterpret_cast<const std::int32_t*>(tile.mask.keys[first / 32]) + v * vector_lanes);
      for (int key = 0; key < keys; ++key) {
        float* s = S + ((first + key) * block.vectors + v) * vector_lanes;
        store(s, select((bits & (1u << key)) != 0, load(s), splat(-infinity)));
      }
    }
  }
}

/// Applies softcap, bias and ALiBi.
inline void modify_scores(const Call& call, const RowBlock& block, const Tile& tile, float* S, CapTerms cap = {}) {
  if (call.softcap > 0) apply_softcap(call, tile.count * block.lanes(), S, cap);
  if (call.bias.data != nullptr) apply_bias(call, block, tile, S);
  if (call.alibi_slopes != nullptr) apply_alibi(call, block, tile, S);
}

/// Hides scores that are not visible.
inline void hide_scores(const RowBlock& block, const Tile& tile, float* S) {
  if (tile.seen == Seen::all) return;
  apply_range(block, tile, S);
  if (tile.mask.hides) apply_mask(block, tile, S);
}

/// All of these steps. S[tile.count][block.lanes()].
inline void finish_scores(const Call& call, const RowBlock& block, const Tile& tile, float* S, CapTerms cap = {},
                          ProgramTerms terms = {}) {
  modify_scores(call, block, tile, S, cap);
  if (call.has_score_program()) {
    call.program->runner.change(*call.program, block.program_rows(), tile.begin, tile.count, S, terms);
  }
  hide_scores(block, tile, S);
}

/// S = K Q^T of a tile, finished. Qt [head_dim][lanes] holds query_factor * Q. The next tile is prefetched in between,
/// in small steps: if all requests were made together, they would wait for each other.
inline void score_tile(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, const float* Qt, float* S,
                       CapTerms cap = {}, NextTile* next = nullptr, ProgramTerms terms = {}) {
  const bool asks = next != nullptr && next->is_wanted();
  const int step = asks ? 8 : diagonal_step(tile);  // keys
  for (int key = 0; key < tile.count; key += step) {
    for (int i = 0; asks && i < step; ++i) next->prefetch_keys(), next->prefetch_values();
    multiply_keys(block, tile, key, smaller(tile.count - key, step), K, Qt, call.head_dim, S);
  }
  finish_scores(call, block, tile, S, cap, terms);
}

}  // namespace
}  // namespace flash_attention::cpu
