#pragma once

// The scores of an edge block, and what hidden rows, a block mask and a mask program hide of it. Both rows of a thread ask
// for the same keys, so each key's numbers are read once.

#include "forward/sm90/scores.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
__device__ __forceinline__ void hide_pairs(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                           int kv_begin) {
  constexpr int groups = ScoreMath<config>::block_kv / 8;
  const int first_row = ptx::registers_fresh(math.row), last_row = math.score.len_q - 1;
  const int rows[2] = {tile::min(first_row, last_row), tile::min(first_row + 8, last_row)};  // others are hidden already
  const int last_key = math.score.visible_kv - 1;
  const auto is_hidden = [&](int r, int group, int e) {
    return math.score.data.hides_pair(rows[r], tile::min(kv_begin + math.column + 8 * group + e, last_key));
  };
  constexpr Features features = config.features;
  constexpr bool few_registers = !tile::Score<features>::linear || features.dropout || config.head_dim_v > 128;
  if constexpr (!features.block_mask && !(few_registers && features.hidden_bounds > 1)) {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = S[4 * group + i];
        s = is_hidden(i / 2, group, i % 2) ? -tile::infinity : s;
      }
    }
  } else {  // addresses and numbers of all groups would fill the registers: a bit for each pair comes first
    static_assert(2 * groups <= 32, "a word for each row");
    unsigned hidden[2] = {};
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) hidden[i / 2] |= is_hidden(i / 2, group, i % 2) ? 1u << (2 * group + i % 2) : 0u;
    }
#pragma unroll
    for (int i = 0; i < ScoreMath<config>::count; ++i) {
      if ((hidden[ScoreMath<config>::row_of(i)] >> (i / 4 * 2 + i % 2) & 1) != 0) S[i] = -tile::infinity;
    }
  }
}

/// Each copy of a program takes its time to compile. One is enough in an edge block, all visible or not, where it may see
/// hidden scores: it reads its tensors inside their sizes only. With a bias, scores and tests are made in one pass.
template <Features features>
constexpr bool modifies_first = features.score_program && !features.bias;

/// The scores of an edge block as the program makes them; then those that are hidden become -inf.
template <ForwardConfig config, typename AllVisible>
__device__ __forceinline__ void modify_then_hide(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                                 int kv_begin, AllVisible all_visible) {
  math.modify(S, kv_begin);
  if (all_visible()) return;
  math.template modify_and_mask<false, false>(S, kv_begin);
  if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, S, kv_begin);
}

}  // namespace flash_attention::forward_sm90
