#pragma once

#include "abi/args.h"

// Which probabilities dropout keeps: a pure function of (seed, offset, batch, head, i, j), docs/numerics.md.

namespace flash_attention::tile {

using namespace abi;

/// The random words of one Philox block. They decide on rows i and i + 8, columns j, j + 1, j + 8 and j + 9: the
/// elements that a thread holds after a tensor-core product.
struct DropoutWords {
  unsigned word[4];

  /// The word that decides on row i + 8 row, column j + 8 column + odd. Each word serves two columns; for the second
  /// its halves are exchanged.
  __device__ __forceinline__ unsigned at(int row, int column, int odd) const {
    const unsigned even_word = word[2 * row + column];
    return odd ? halves_exchanged(even_word) : even_word;
  }
  __device__ __forceinline__ static unsigned halves_exchanged(unsigned word) { return word << 16 | word >> 16; }
};

__device__ __forceinline__ void philox_round(unsigned& c0, unsigned& c1, unsigned& c2, unsigned& c3, unsigned key0,
                                             unsigned key1) {
  // one wide multiplication each
  const unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
  c0 = static_cast<unsigned>(product1 >> 32) ^ c1 ^ key0;
  c1 = static_cast<unsigned>(product1);
  c2 = static_cast<unsigned>(product0 >> 32) ^ c3 ^ key1;
  c3 = static_cast<unsigned>(product0);
}

/// Philox4x32-7 (Salmon et al., 2011). If only c1 differs from call to call, four of its fourteen products are the same
/// in all calls.
__device__ __forceinline__ DropoutWords philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned key0,
                                               unsigned key1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    philox_round(c0, c1, c2, c3, key0, key1);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Dropout of one sequence and head.
struct Dropout {
  unsigned key0;
  unsigned key1;
  unsigned plane;  // batch * heads_q + head
  unsigned offset;
  unsigned threshold;
  float keep_scale;

  __device__ __forceinline__ Dropout(const AttentionArgs& args, int batch_idx, int head_idx)
      : key0(static_cast<unsigned>(args.seed)),
        key1(static_cast<unsigned>(args.seed >> 32) ^ static_cast<unsigned>(args.offset >> 32)),
        plane(static_cast<unsigned>(batch_idx * args.heads_q + head_idx)),
        offset(static_cast<unsigned>(args.offset)),
        threshold(args.drop_threshold),
        keep_scale(args.keep_scale) {}

  // Blocks are counted by rows without bit 3 of i, and by columns without bits 0 and 3 of j.
  __device__ __forceinline__ static unsigned row_counter(int i) {
    return static_cast<unsigned>(i) / 16 * 8 + static_cast<unsigned>(i) % 8;
  }
  __device__ __forceinline__ static unsigned column_counter(int j) {
    return static_cast<unsigned>(j) / 16 * 4 + static_cast<unsigned>(j) % 8 / 2;
  }

  __device__ __forceinline__ DropoutWords words(unsigned row, unsigned column) const {
    return philox(row, column, plane, offset, key0, key1);
  }
  /// The words of this block and of the block of the next 16 keys. A round is a chain of dependent instructions, so two
  /// blocks run side by side.
  __device__ __forceinline__ void words(unsigned row, unsigned column, DropoutWords (&random)[2]) const {
    unsigned round_key0 = key0, round_key1 = key1;
#pragma unroll
    for (int n = 0; n < 2; ++n) random[n] = {{row, column + 4 * n, plane, offset}};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
#pragma unroll
      for (DropoutWords& r : random) philox_round(r.word[0], r.word[1], r.word[2], r.word[3], round_key0, round_key1);
      round_key0 += 0x9E3779B9u;
      round_key1 += 0xBB67AE85u;
    }
  }

  /// 1 / (1 - p) if the word keeps its score, otherwise 0.
  __device__ __forceinline__ float factor(unsigned word) const { return word >= threshold ? keep_scale : 0.0f; }

  /// The factors of row i, columns j and j + 1, j even.
  __device__ __forceinline__ void pair(int i, int j, float& first, float& second) const {
    const DropoutWords random = words(row_counter(i), column_counter(j));
    const bool lower = i / 8 % 2 != 0, right = j / 8 % 2 != 0;
    const unsigned word = lower ? (right ? random.word[3] : random.word[2]) : (right ? random.word[1] : random.word[0]);
    first = factor(word);
    second = factor(DropoutWords::halves_exchanged(word));
  }

  __device__ __forceinline__ bool keeps(int i, int j) const {
    float even, odd;
    pair(i, j / 2 * 2, even, odd);
    return (j % 2 == 0 ? even : odd) != 0.0f;
  }
};

}  // namespace flash_attention::tile
