#pragma once

#include "abi/args.h"

// Which probabilities dropout keeps: a pure function of (seed, offset, batch, head, i, j), docs/numerics.md.

namespace flash_attention::tile {

using namespace abi;

struct DropoutWords {
  unsigned word[4];
};

/// Philox4x32-10 (Salmon et al., 2011).
__device__ __forceinline__ DropoutWords philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned key0,
                                               unsigned key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;  // one wide multiplication each
    c0 = static_cast<unsigned>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<unsigned>(product1);
    c2 = static_cast<unsigned>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<unsigned>(product0);
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

  /// The words of columns j, j + 1, j + 8, j + 9 of row i, where j mod 16 is 0, 2, 4 or 6: those a thread holds after a
  /// tensor-core product.
  __device__ __forceinline__ DropoutWords words(int i, int j) const {
    return philox(static_cast<unsigned>(4 * (j / 16) + j % 8 / 2), static_cast<unsigned>(i), plane, offset, key0, key1);
  }

  /// 1 / (1 - p) where the word keeps its score, else 0.
  __device__ __forceinline__ float factor(unsigned word) const { return word >= threshold ? keep_scale : 0.0f; }

  __device__ __forceinline__ bool keeps(int i, int j) const { return words(i, j).word[j / 8 % 2 * 2 + j % 2] >= threshold; }

  /// The factors of row i, columns j and j + 1, j even.
  __device__ __forceinline__ void pair(int i, int j, float& first, float& second) const {
    const DropoutWords random = words(i, j);
    const bool upper = j / 8 % 2 != 0;
    first = factor(upper ? random.word[2] : random.word[0]);
    second = factor(upper ? random.word[3] : random.word[1]);
  }
};

}  // namespace flash_attention::tile
