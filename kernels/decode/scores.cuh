#pragma once

#include "decode/schedule.cuh"

// From dot products to scores, on accumulators as tile/mma.cuh describes them: for the kernels of decode/.

namespace flash_attention::decode {

/// Scores of rows `row` and `row` + 8 of an item; -inf where hidden. A lane's keys are kv_begin + 8 n and the next.
template <bool some_hidden, ForwardConfig config, int blocks>
__device__ __forceinline__ void score_rows(float (&S)[blocks][4], const AttentionArgs& args, const Item<config>& item,
                                           const tile::Sequence& sequence, int row_begin, int kv_begin) {
  constexpr Features features = config.features;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + 8 * half, packed = item.row_tile * config.block_q + row;
    const bool exists = row < config.block_q && packed < sequence.len_q * config.group;
    // Without hidden scores, rows that do not exist read what belongs to the first, and are not stored.
    const int first = item.row_tile * config.block_q;
    const int query = (exists ? packed : first) / config.group;
    const tile::Score<features> score(args, sequence,
                                      item.kv_head_idx * config.group + (exists ? packed : first) % config.group);
    tile::KeyRange range = score.keys_of(query);
    if (!exists) range.end = 0;
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const int j = kv_begin + 8 * n + e % 2;
        if (some_hidden && !score.visible(range, query, j)) {
          S[n][e] = -tile::infinity;
        } else {
          S[n][e] = score.in_units(S[n][e], query, j);
        }
      }
    }
  }
}

}  // namespace flash_attention::decode
