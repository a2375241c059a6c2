#pragma once

// Hides scores of an edge block by mask data and mask programs. Both rows of a thread have the same keys, so the numbers of
// a key are read once.

#include "forward/sm90/schedule.cuh"
#include "forward/sm90/softmax.cuh"
#include "mask/words.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
__device__ __forceinline__ void hide_pairs(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                           int kv_begin) {
  constexpr int groups = ScoreMath<config>::block_kv / 8;
  const int first_row = ptx::hide_from_compiler(math.row), last_row = math.score.sight.len_q - 1;
  const int rows[2] = {tile::min(first_row, last_row), tile::min(first_row + 8, last_row)};  // others are hidden already
  const int last_key = math.score.sight.visible_kv - 1;
  const auto is_hidden = [&](int r, int group, int e) {
    return math.score.sight.data.hides_pair(rows[r], tile::min(kv_begin + math.column + 8 * group + e, last_key));
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
  } else {  // holding numbers of all groups would take too many registers: first compute a bit for each pair
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

/// The words of a row that contain the bits of a thread's keys. One lane has written the bits of block_kv / 32 neighbouring
/// keys, so a group of 8 keys has as many bits as lanes.
using WordPair = ptx::Vector<unsigned, 2>;
template <ForwardConfig config>
__device__ __forceinline__ const WordPair* word_pair(const ScoreMath<config>& math,
                                                     const mask::Words<Shape<config>::block_kv>* row) {
  return reinterpret_cast<const WordPair*>(row) + (Shape<config>::block_kv == 128 ? math.column / 2 % 2 : 0);
}

/// Extracts the bits of a thread's two rows: key 8 * group + column + e becomes bit 256 / block_kv * group + e.
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

/// The same from this warpgroup's words in shared memory (MaskWriter).
template <ForwardConfig config>
__device__ __forceinline__ void read_words(const ScoreMath<config>& math, const mask::Words<Shape<config>::block_kv>* words,
                                           unsigned (&visible)[2]) {
  const auto* const own = words + ptx::hide_from_compiler(math.row) % wg_rows;
  take_bits<config>(math, {*word_pair<config>(math, own), *word_pair<config>(math, own + 8)}, visible);
}

/// Hides scores whose bit in `visible` is 0; at an edge also those outside of the range of keys that the row sees.
template <ForwardConfig config>
__device__ __forceinline__ void hide_unseen(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                            int kv_begin, bool at_edge, unsigned (&visible)[2]) {
  using Math = ScoreMath<config>;
  constexpr int places = 256 / Math::block_kv;  // bits of a group of 8 keys
  const int first_row = ptx::hide_from_compiler(math.row), column = math.column;
  // The bits of all keys before `key`, which counts from kv_begin + column.
  const auto before = [](int key) {
    const int inside = tile::max(0, tile::min(key, Math::block_kv)), bits = inside / 8 * places + tile::min(inside % 8, 2);
    return bits > 31 ? 0xffffffffu : (1u << bits) - 1;
  };
  const tile::Score<config.features>& score = math.score;
  if (at_edge) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const tile::KeyRange range = score.sight.keys_of(first_row + 8 * r);
      visible[r] &= before(range.end - kv_begin - column);
      if constexpr (Shape<config>::left_edge) visible[r] &= ~before(range.begin - kv_begin - column);
    }
  }
#pragma unroll
  for (int i = 0; i < Math::count; ++i) {
    S[i] = (visible[Math::row_of(i)] >> (i / 4 * places + i % 2) & 1) != 0 ? S[i] : -tile::infinity;
  }
}

/// Whether to run a score program first and hide scores afterwards. Each inlined copy of a program costs compile time, and
/// this way an edge block needs only one. The program then also sees hidden scores, which is safe: it reads its tensors
/// only within their sizes. With a bias, scores and tests are computed in one pass.
template <Features features>
constexpr bool modifies_first = features.score_program && !features.bias;

/// Applies the program to the scores of an edge block; then sets the hidden ones to -inf.
template <ForwardConfig config, typename AllVisible>
__device__ __forceinline__ void modify_then_hide(const ScoreMath<config>& math, typename ScoreMath<config>::Tile& S,
                                                 int kv_begin, AllVisible all_visible) {
  math.modify(S, kv_begin);
  if (all_visible()) return;
  math.template modify_and_mask<false, false>(S, kv_begin);
  if constexpr (tile::MaskData<config.features>::present) hide_pairs(math, S, kv_begin);
}

// Mask bits: one bit for each pair of a tested block, if masks choose the blocks. Three warps of the producer warpgroup
// have nothing to load. They read the same tiles and lists, and compute the bits of a block while the consumers work on the
// previous block:
//
//     for each tile, for each block of its list that the masks cut, for each warpgroup:
//       compute the words of some rows (mask/words.cuh)
//       wait until the warpgroup has read its words; store
//
// Mask data of a key is read or computed once for 64 rows, mask data of a row once for a tile. Edges of windows and
// lengths are not in the bits: the consumers apply them with a shift (hide_unseen). A block that is cut only by such an
// edge has no words.

template <ForwardConfig config>
struct MaskWriter {
  using S = Shape<config>;
  using Words = mask::Words<S::block_kv>;
  static constexpr int rows_of_warp = tile::ceil_div(wg_rows, mask_warps);  // of each warpgroup
  using Maker = mask::WordMaker<config.features, S::block_kv, rows_of_warp>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warp;  // of the three
  const int lane;
  unsigned odd_writes = 0;  // a bit for each warpgroup: the parity of the blocks written

  /// Computes the bits for all tiles of all attempts.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const PipelineState<S::q_stages> q(n);
      ptx::mbarrier_wait(shared.Q_full[q.stage][0], q.phase);  // the next tile is known
      const Tile tile = shared.tiles[n % tile_stages];
      __syncwarp();  // all lanes have read the tile
      if (lane == 0) ptx::mbarrier_arrive(shared.Q_empty[q.stage][0]);
      if (tile.work == Work::none) {
        ptx::mbarrier_wait(shared.Q_empty[q.stage][0], q.phase);  // all tiles of the attempt are done and marked
        if (shared.last_attempt <= static_cast<int>(tile.attempt)) return;
      } else if (!tile.sees_nothing()) {
        write_tile(tile);
      }
    }
  }

 private:
  __device__ __forceinline__ void write_tile(const Tile& tile) {
    const Maker maker{args, tile.sequence, tile.head_idx, lane, {args, tile.sequence, tile.head_idx}};
    typename Maker::Row own[S::warpgroups];
#pragma unroll
    for (int w = 0; w < S::warpgroups; ++w) own[w] = maker.row_at(first_row(tile, w) + lane);
    auto list = BlockList<config>::from_first(args, tile);
    int block = list.seek(tile.first);
#pragma unroll 1
    while (block >= 0) {
      const ListedBlock described = list.describe(block, tile.attempt);
      const auto is_wanted = [&](int w) { return described.is_seen(w) && described.is_masked(w); };
      if (is_wanted(0) || is_wanted(S::warpgroups - 1)) {
        ptx::path<"forward/sm90 words of a mask">();
        const typename Maker::Keys known = maker.keys_at(block * S::block_kv);
#pragma unroll 1
        for (int w = 0; w < S::warpgroups; ++w) {
          if (!is_wanted(w)) continue;
          store_words(maker.words(known, w == 0 ? own[0] : own[S::warpgroups - 1], first_row(tile, w)), w);
        }
      }
      block = list.after(block);
    }
  }

  __device__ __forceinline__ int first_row(const Tile& tile, int w) const {
    return tile.q_begin + w * wg_rows + warp * rows_of_warp;
  }

  __device__ __forceinline__ void store_words(const Words& words, int w) {
    ptx::mbarrier_wait(shared.mask.empty[w],
                       (odd_writes >> w & 1) ^ 1);  // the warpgroup has read the previous block's words
    const int row = warp * rows_of_warp + lane;
    if (lane < rows_of_warp && row < wg_rows) shared.mask.words[w][row] = words;
    __syncwarp();  // all lanes have written their rows
    if (lane == 0) ptx::mbarrier_arrive(shared.mask.full[w]);
    odd_writes ^= 1u << w;
  }
};

}  // namespace flash_attention::forward_sm90
