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

/// The words of a row that are about a thread's keys. A lane has made those of block_kv / 32 neighbouring keys, so a group
/// of 8 keys has as many bits as lanes.
using WordPair = ptx::Vector<unsigned, 2>;
template <ForwardConfig config>
__device__ __forceinline__ const WordPair* word_pair(const ScoreMath<config>& math,
                                                     const mask::Words<Shape<config>::block_kv>* row) {
  return reinterpret_cast<const WordPair*>(row) + (Shape<config>::block_kv == 128 ? math.column / 2 % 2 : 0);
}

/// What the words say of the keys of a thread's two rows: key 8 * group + column + e has bit 256 / block_kv * group + e.
template <ForwardConfig config>
__device__ __forceinline__ void take_bits(const ScoreMath<config>& math, const WordPair (&words)[2],
                                          unsigned (&visible)[2]) {
  constexpr int keys = Shape<config>::block_kv / 32;
  constexpr unsigned firsts = keys == 4 ? 0x55555555u : 0x11111111u;
  static_assert(keys == 2 || keys == 4);
  const int shift = keys == 4 ? math.column / 4 : math.column / 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) visible[r] = (words[r][0] >> shift & firsts) | (words[r][1] >> shift & firsts) << 1;
}

/// The same from the words of this warpgroup in shared memory (mask_words.cuh).
template <ForwardConfig config>
__device__ __forceinline__ void read_words(const ScoreMath<config>& math, const mask::Words<Shape<config>::block_kv>* words,
                                           unsigned (&visible)[2]) {
  const auto* const own = words + ptx::registers_fresh(math.row) % wg_rows;
  take_bits<config>(math, {*word_pair<config>(math, own), *word_pair<config>(math, own + 8)}, visible);
}

/// Hides what is not in `visible`, and at an edge what is not in the range of keys that a row sees.
template <ForwardConfig config>
__device__ __forceinline__ void hide_unseen(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                            int kv_begin, bool at_edge, unsigned (&visible)[2]) {
  using Math = ScoreMath<config>;
  constexpr int places = 256 / Math::block_kv;  // bits of a group of 8 keys
  const int first_row = ptx::registers_fresh(math.row), column = math.column;
  // The bits of the keys before a key, which is counted from kv_begin + column.
  const auto before = [](int key) {
    const int inside = tile::max(0, tile::min(key, Math::block_kv)), bits = inside / 8 * places + tile::min(inside % 8, 2);
    return bits > 31 ? 0xffffffffu : (1u << bits) - 1;
  };
  const tile::Score<config.features>& score = math.score;
  if (at_edge) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const tile::KeyRange range = score.keys_of(first_row + 8 * r);
      visible[r] &= before(range.end - kv_begin - column);
      if constexpr (Shape<config>::left_edge) visible[r] &= ~before(range.begin - kv_begin - column);
    }
  }
#pragma unroll
  for (int i = 0; i < Math::count; ++i) {
    S[i] = (visible[Math::row_of(i)] >> (i / 4 * places + i % 2) & 1) != 0 ? S[i] : -tile::infinity;
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
