#pragma once

#include "forward/sm80.cuh"
#include "tile/dropout.cuh"

// The scores of forward/sm80 in registers, between Q K^T and softmax: options and mask; and dropout after it.

namespace flash_attention {

/// Scores from dot products, -inf where hidden.
template <ForwardConfig config>
template <bool some_hidden>
__device__ __forceinline__ void ForwardSm80<config>::score_tile(Scores& S, int kv_begin) const {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = q_begin + warp_row + 16 * m + place.row + 8 * half;
      const tile::KeyRange range = score.keys_of(i);
      // Without hidden scores the tile's last rows may still not exist: they read the last row's bias and are not stored.
      const int existing = some_hidden ? i : tile::min(i, score.len_q - 1);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const int j = kv_begin + 8 * n + place.column + e % 2;
          if (some_hidden && !score.visible(range, i, j)) {
            S[m][n][e] = -tile::infinity;
          } else {
            S[m][n][e] = score.in_units(S[m][n][e], existing, j);
          }
        }
      }
    }
  }
}

/// P = 0 where dropped; the factor 1 / (1 - p) waits for the end.
template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::drop_tile(Scores& P, int kv_begin) const {
  const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    const unsigned row = tile::Dropout::row_counter(q_begin + warp_row + 16 * m + place.row);
#pragma unroll
    for (int n = 0; n < block_kv / 16; ++n) {
      const tile::DropoutWords random = dropout.words(row, tile::Dropout::column_counter(kv_begin + 16 * n + place.column));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& p = P[m][2 * n + e / 4][e % 4];
        p = random.at(e / 2 % 2, e / 4, e % 2) >= dropout.threshold ? p : 0;
      }
    }
  }
}

}  // namespace flash_attention
