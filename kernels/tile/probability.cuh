#pragma once

#include "tile/product.cuh"
#include "tile/score.cuh"

// A tile of 64 x 64 probabilities, computed again from lse on CUDA cores. Statistics and their gradients are sums of
// these.

namespace flash_attention::tile {

/// One sequence and query head.
template <Features features, int dim>
struct Probabilities {
  using Element = const ptx::Element<features.dtype>;
  static constexpr int block = block_rows;

  Rows<Element> Q, K;
  Score<features> score;
  const float* lse;

  __device__ __forceinline__ Probabilities(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : Q(query_rows<Element, features>(args.Q, sequence, head_idx)),
        K(key_rows<Element, features>(args.K, sequence, head_idx / args.group)),
        score(args, sequence, head_idx),
        lse(args.lse + statistics_offset<features>(args, sequence, head_idx)) {
    Q.count = sequence.len_q;
    K.count = sequence.visible_kv;
  }

  /// P = exp(S - lse); 0 if hidden, and in rows that see nothing. Returns false for a tile that a mask hides.
  template <typename Storage>
  __device__ __forceinline__ bool compute(float (&P)[4][4], int q_begin, int kv_begin, Storage& storage) const {
    if (score.sight.template masks_hide<block, block>(q_begin, kv_begin)) return false;
    const bool some_hidden =
        q_begin + block > score.sight.len_q || !score.sight.template all_visible<block, block>(q_begin, kv_begin);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) P[r][c] = 0;
    }
    add_dot_products<dim>(P, Q.from(q_begin), K.from(kv_begin), storage);
    const ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = q_begin + place.row + r;
      const float of_row = i < score.sight.len_q ? lse[i] : -infinity;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = kv_begin + place.column + c;
        if (of_row < lowest_lse || (some_hidden && !score.sight.visible(i, j))) {
          P[r][c] = 0;
        } else {
          const float full = score.full(P[r][c], i, j);
          P[r][c] = full == -infinity ? 0 : exp(full - of_row);
        }
      }
    }
    return true;
  }
};

}  // namespace flash_attention::tile
