#pragma once

#include "decode/schedule.cuh"
#include "tile/fixed_order.cuh"
#include "tile/group_pairs.cuh"

// Turns dot products into scores, for the kernels of decode/. The layout of the accumulators is that of tile/mma.cuh.

namespace flash_attention::decode {

/// A score in units of unit_scale(), with the arithmetic of the fixed order: forward/sm90's.
template <Features features>
__device__ __forceinline__ float ordered_score(const tile::Score<features>& score, float dot, int i, int j) {
  if constexpr (tile::Score<features>::linear) return dot;
  float added = 0;
  if constexpr (features.bias) added = tile::bounded_bias<features.bias_dtype>(score.bias[i * score.bias_stride + j]);
  if constexpr (features.alibi) {
    const int distance = i + score.sight.len_kv - score.sight.len_q - j;
    added = ptx::fma(-score.slope, ptx::abs(static_cast<float>(distance)), added);
  }
  return tile::ordered_score<features.softcap>(dot, score.scale, score.softcap, added);
}

/// Scores of rows `row_begin` and `row_begin` + 8 of an item, in place; -inf if hidden. A lane has keys kv_begin + 8 n and
/// kv_begin + 8 n + 1.
template <bool some_hidden, ForwardConfig config, int blocks>
__device__ __forceinline__ void score_rows(float (&S)[blocks][4], const AttentionArgs& args, const Item<config>& item,
                                           const tile::Sequence& sequence, int row_begin, int kv_begin) {
  constexpr Features features = config.features;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + 8 * half, packed = item.first_row() + row;
    const bool exists = row < config.block_q && packed < sequence.len_q * config.group;
    // A row that does not exist reads the options of the item's first row, so its addresses are valid. It is not stored.
    const int first = item.first_row();
    const int query = (exists ? packed : first) / config.group;
    const tile::Score<features> score(args, sequence,
                                      item.kv_head_idx * config.group + (exists ? packed : first) % config.group);
    tile::KeyRange range = score.sight.keys_of(query);
    if (!exists) range.end = 0;
    unsigned bits = ~0u;  // of a bit mask, for the keys of four blocks
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      if constexpr (features.bit_mask() && some_hidden) {
        if (n % 4 == 0) bits = score.sight.bits.word(query, kv_begin + 8 * n);
      }
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const int j = kv_begin + 8 * n + e % 2;
        const bool shown = (bits >> (8 * (n % 4) + e % 2) & 1) != 0;
        if (some_hidden && !(shown && score.sight.visible_but_by_bits(range, query, j))) {
          S[n][e] = -tile::infinity;
        } else {
          S[n][e] = has_fixed_order(config) ? ordered_score(score, S[n][e], query, j) : score.in_units(S[n][e], query, j);
        }
      }
    }
  }
}

/// The same for scores whose keys are the rows of a product (turned.cuh): lane (g, t) has keys kv_begin + 16 m + g and 8
/// further on, of rows 8 r + 2 t and 8 r + 2 t + 1 of the item.
template <bool some_hidden, ForwardConfig config, int key_tiles, int row_tiles>
__device__ __forceinline__ void score_turned(float (&S)[key_tiles][row_tiles][4], const AttentionArgs& args,
                                             const Item<config>& item, const tile::Sequence& sequence, int kv_begin) {
  constexpr float factor = tile::group_factor<key_type(config.features)>;  // linear scores get it with their scale
  const int lane = threadIdx.x % 32, first = item.first_row();
#pragma unroll
  for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * r + lane % 4 * 2 + e, packed = first + row;
      const bool exists = row < config.block_q && packed < sequence.len_q * config.group;
      const int query = (exists ? packed : first) / config.group;
      const tile::Score<config.features> score(args, sequence,
                                               item.kv_head_idx * config.group + (exists ? packed : first) % config.group);
      tile::KeyRange range = score.sight.keys_of(query);
      if (!exists) range.end = 0;
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = kv_begin + 16 * m + 8 * half + lane / 4;
          float& value = S[m][r][2 * half + e];
          if (some_hidden && !score.sight.visible_but_by_bits(range, query, j)) {
            value = -tile::infinity;
          } else {
            value = tile::Score<config.features>::linear ? value : score.full(value * factor, query, j);
          }
        }
      }
    }
  }
}

}  // namespace flash_attention::decode
