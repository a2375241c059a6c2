#pragma once

// The same as scores.h for scores that are in rows: S[row][key] with block_kv floats from row to row. Vectors go along
// the keys. Scores past the last key of the tile are never used.

#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

/// 0, 1, 2, ...
template <int... lane>
FLASH_ATTENTION_INLINE Int lane_numbers(LaneList<lane...>) {
  return Int{lane...};
}

/// S[key] = of(key, S[key]) for a row, a vector of keys at a time.
template <class Of>
FLASH_ATTENTION_INLINE void change_row(float* S, int keys, Of of) {
  for (int key = 0; key < keys; key += vector_lanes) store(S + key, of(key, load(S + key)));
}

inline void add_bias_to_row(const Call& call, const RowBlock& block, const Tile& tile, int row, float* S) {
  with_any_element(call.bias.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* bias = reinterpret_cast<const typename T::Stored*>(call.bias.data) + block.batch * call.bias.batch_stride +
                       block.head[row] * call.bias.head_stride + block.query[row] * call.bias.q_stride + tile.begin;
    change_row(S, tile.count, [&](int key, Vec s) { return s + scaled_bias(load_some<T>(bias + key, tile.count - key)); });
  });
}

inline void add_alibi_to_row(const Call& call, const RowBlock& block, const Tile& tile, int row, float* S) {
  const float slope = call.alibi_slopes[block.batch * call.alibi_batch_stride + block.head[row]] * log2_e;
  const std::int64_t position = block.query[row] + block.sequence.kv_used - block.sequence.q_used - tile.begin;
  const Vec numbers = __builtin_convertvector(lane_numbers(Lanes{}), Vec);
  change_row(S, tile.count,
             [&](int key, Vec s) { return s - slope * absolute(static_cast<float>(position - key) - numbers); });
}

/// Hides scores outside of the row's range of keys.
inline void apply_range_to_row(const RowBlock& block, const Tile& tile, int row, float* S) {
  const Int numbers = lane_numbers(Lanes{}) + static_cast<std::int32_t>(tile.begin);
  change_row(S, tile.count, [&](int key, Vec s) {
    const Int j = numbers + key;
    return select((j >= block.begin[row]) & (j < block.end[row]), s, splat(-infinity));
  });
}

/// Hides scores that the masks hide.
inline void apply_mask_to_row(const Tile& tile, int row, float* S) {
  const Uint bit = (Uint{} + 1u) << (Uint)lane_numbers(Lanes{});
  change_row(S, tile.count, [&](int key, Vec s) {
    const std::uint32_t shown = tile.mask.keys[key / 32][row] >> (key % 32);
    return select((bit & shown) != 0, s, splat(-infinity));
  });
}

/// All of these steps, for the rows of a block. derivative is that of softcap and may be null.
inline void finish_scores_in_rows(const Call& call, const RowBlock& block, const Tile& tile, float* S,
                                  float* derivative = nullptr) {
  for (int row = 0; row < block.rows; ++row, S += block_kv) {
    if (call.softcap > 0) {
      const int whole = round_up(tile.count, vector_lanes);
      apply_softcap(call, whole, S, {.first = derivative != nullptr ? derivative + row * block_kv : nullptr});
    }
    if (call.bias.data != nullptr) add_bias_to_row(call, block, tile, row, S);
    if (call.alibi_slopes != nullptr) add_alibi_to_row(call, block, tile, row, S);
    if (tile.seen == Seen::all) continue;
    if (block.begin[row] > tile.begin || block.end[row] < tile.begin + tile.count) {
      apply_range_to_row(block, tile, row, S);
    }
    if (tile.mask.hides) apply_mask_to_row(tile, row, S);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
