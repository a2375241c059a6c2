#pragma once

// The place of a tile's scores among queries and keys, and which of them are hidden or dropped.
//
// The tile has either orientation: with the keys along the rows (S^T, for dK and dV) or with the queries along the rows (S,
// for dQ). Thread t of a warpgroup holds, in register i (ptx/wgmma.cuh), row 16 (t / 32) + lane / 4 + 8 ((i / 2) % 2) and
// column 8 (i / 4) + 2 (lane % 4) + i % 2.

#include "backward/sm90/parts/shape.cuh"
#include "mask/step_words.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/dropout.cuh"

namespace flash_attention::backward_sm90 {

enum class Rows : int { keys, queries };

template <BackwardConfig config, Rows rows, int columns>
struct TilePlaces {
  static constexpr Features features = config.features;
  static constexpr int count = columns / 2;
  static constexpr int words = tile::ceil_div(count, 32);

  const tile::Score<features>& score;
  const tile::Dropout& dropout;
  float exponent_scale;
  int q_begin;            // of the tile
  int kv_begin;           // of the tile
  int row;                // this thread's first row, in the tile
  int column;             // this thread's first column, in the tile
  bool edge;              // some scores of the tile are hidden
  bool nonfinite_row[2];  // Rows::keys: the key holds a NaN or Inf, which was taken out of shared memory

  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 % 2; }
  __device__ __forceinline__ static constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }
  __device__ __forceinline__ int query(int i) const {
    return q_begin + (rows == Rows::keys ? column + column_of(i) : row + 8 * row_of(i));
  }
  __device__ __forceinline__ int key(int i) const {
    return kv_begin + (rows == Rows::keys ? row + 8 * row_of(i) : column + column_of(i));
  }

  /// Bits of the registers whose score is hidden, and of those that dropout drops.
  struct Marks {
    unsigned hidden[words] = {};
    unsigned dropped[words] = {};

    __device__ __forceinline__ bool is_hidden(int i) const { return hidden[i / 32] >> (i % 32) & 1; }
    __device__ __forceinline__ bool is_dropped(int i) const { return dropped[i / 32] >> (i % 32) & 1; }
    /// A copy that the compiler takes for another number: it would keep what it has tested once, bit by bit.
    __device__ __forceinline__ void test_again() {
#pragma unroll
      for (unsigned& word : dropped) word = ptx::shuffle_xor(word, 0);
    }
  };

  /// Boolean masks and programs are asked by the lanes of a warp together: all of them come here at once.
  static constexpr bool by_votes = (features.mask || features.mask_program) && columns == tile_rows;

  /// Or they have been, and what they said is in words; windows and lengths, and tiles without words, are ranges.
  static constexpr bool by_words = config.step_words && rows == Rows::keys;

  /// words_of_tile: those of this one, or null.
  __device__ __forceinline__ void mark(Marks& marks, [[maybe_unused]] const unsigned* words_of_tile = nullptr) const {
    if constexpr (by_words) {
      mark_by_words(marks, words_of_tile);
    } else {
      mark_hidden(marks);
    }
    if constexpr (features.dropout) mark_dropped(marks);
  }

  /// Starts to bring the bytes of a boolean mask to L2, of 64 queries from `q` on: a thread for each.
  __device__ __forceinline__ static void prefetch_mask(const tile::Score<features>& score, int q, int key, int thread) {
    if constexpr (features.mask) {
      if (thread < tile_rows && q + thread < score.len_q && key < score.visible_kv)
        ptx::prefetch_L2(score.mask + (q + thread) * score.mask_stride + key);
    }
  }

  // The loops run one group of registers at a time (the group's first query is hidden from the compiler), so that addresses
  // and random words of all groups are not held at once.

  __device__ __forceinline__ void mark_hidden(Marks& marks) const {
    if (!edge) return;
    if constexpr (by_votes) {
      const mask::Votes<features, rows == Rows::keys> votes{score, q_begin, kv_begin, row, column};
      const ptx::Vector<unsigned, 2> visible = votes.visible();
      marks.hidden[0] = ~(visible[0] | visible[1] << 2);
      return;
    }
#pragma unroll
    for (int group = 0; group < count; group += 4) {
      const int shift = ptx::registers_fresh(0);
#pragma unroll
      for (int i = group; i < group + 4; ++i) {
        if (!score.visible(query(i) + shift, key(i))) marks.hidden[i / 32] |= 1u << (i % 32);
      }
    }
  }

 private:
  __device__ __forceinline__ void mark_by_words(Marks& marks, const unsigned* words_of_tile) const {
    constexpr bool has_ranges = features.has_window() || features.chunk || features.seqused_q || features.seqused_kv ||
                                features.key_lengths || features.left_padding;
    if (!edge) return;
    unsigned visible = 0xffffffffu;
    if (words_of_tile != nullptr) visible = words_of_tile[row / 16 * 32 + row % 16 * 4 + column / 2];
    if (has_ranges || words_of_tile == nullptr) {
      const ptx::Vector<unsigned, 2> ranges = mask::Votes<features, true>{score, q_begin, kv_begin, row, column}.ranges();
      visible &= ranges[0] | ranges[1] << 2;
    }
    marks.hidden[0] = ~visible;
  }

  /// A Philox block decides on eight scores. With the queries along the rows a thread holds all of them. With the keys
  /// along the rows it holds those of an even or of an odd key, and the lane of the key's neighbour the others: each of the
  /// two works out half of the blocks, of the even or of the odd queries, for both.
  __device__ __forceinline__ void mark_dropped(Marks& marks) const {
    const int odd = rows == Rows::keys ? row % 2 : 0;
    tile::Dropout dropout = this->dropout;
    if constexpr (rows == Rows::keys) {  // known to be uniform: so are the keys of the rounds
      dropout.key0 = ptx::shuffle(dropout.key0, 0);
      dropout.key1 = ptx::shuffle(dropout.key1, 0);
    }
    unsigned of_even[words] = {}, of_odd[words] = {};  // Rows::keys: of the blocks' even and odd keys
#pragma unroll
    for (int group = 0; group < count; group += 8) {
      const int shift = ptx::registers_fresh(0);
      const tile::DropoutWords random =
          dropout.words(tile::Dropout::row_counter(query(group) + odd + shift), tile::Dropout::column_counter(key(group)));
#pragma unroll
      for (int e = 0; e < (rows == Rows::keys ? 4 : 8); ++e) {
        if constexpr (rows == Rows::keys) {
          const int i = group + e / 2 * 4 + e % 2 * 2;  // of the even query; word 2 r + c is that of query + 8 r, key + 8 c
          if (random.word[e] < dropout.threshold) of_even[i / 32] |= 1u << (i % 32);
          if (tile::DropoutWords::halves_exchanged(random.word[e]) < dropout.threshold) of_odd[i / 32] |= 1u << (i % 32);
        } else {
          const int i = group + e;
          if (random.at(row_of(e), e / 4, e % 2) < dropout.threshold) marks.dropped[i / 32] |= 1u << (i % 32);
        }
      }
    }
    if constexpr (rows == Rows::keys) {
#pragma unroll
      for (int w = 0; w < words; ++w) {
        const unsigned own = odd ? of_odd[w] : of_even[w], others = odd ? of_even[w] : of_odd[w];
        marks.dropped[w] = own << odd | ptx::shuffle_xor(others, 4) << (1 - odd);
      }
    }
  }
};

}  // namespace flash_attention::backward_sm90
