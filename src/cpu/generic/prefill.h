#pragma once

// Forward for many queries: flash attention with a query in each SIMD lane.
//
//     Qt = scale * Q^T of 48 queries                       packed once: [head_dim][48]
//     for each tile of 64 keys that some query sees:
//         S = K Qt;  softcap, bias, ALiBi, mask            [64][48], stays in L1
//         P = 2^(S - row_max), row_sum, rescale            up and down the lanes: no reduction across a vector
//         Ot = rescale * Ot + V^T P                        [head_dim_v][48]
//     out = Ot^T / row_sum
//
// Both products broadcast elements of K and V in the order in which they lie, so neither is transposed. A first step copies
// them where the rows of a head lie far apart or are not float (copy_keys).

#include "cpu/generic/dropout.h"
#include "cpu/generic/hidden.h"
#include "cpu/generic/partial.h"

namespace flash_attention::cpu {
namespace {

struct PrefillScratch {
  alignas(64) float Qt[max_head_dim * block_q];
  alignas(64) float Ot[max_head_dim * block_q];
  alignas(64) float S[block_kv * block_q];
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
};

inline void prefill(const Call& call, std::int64_t item_idx, void* memory) {
  PrefillScratch& scratch = *static_cast<PrefillScratch*>(memory);
  const ForwardItem item(call, item_idx);
  RowBlock block = item.rows(call);
  if (block.rows == 0) return;
  take_split(call, item.split, block);

  gather_rows(call, block, call.q, call.head_dim, query_factor(call), scratch.Qt);
  scratch.statistics.reset();
  bool first = true;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile = make_tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, false, scratch.K);
    score_tile(call, block, tile, K, scratch.Qt, scratch.S);
    softmax_tile(block, tile, scratch.S, scratch.statistics, scratch.rescale);
    if (call.dropout) apply_dropout(call, block, tile, scratch.S, scratch.keep);
    const FloatRows V = key_rows(call, block, call.v, begin, tile.count, call.head_dim_v, false, scratch.V);
    if (first) {
      add_to_lanes<Start::zero>(block, tile, V, call.head_dim_v, scratch.S, scratch.Ot, scratch.safe);
    } else {
      add_to_lanes<Start::rescale>(block, tile, V, call.head_dim_v, scratch.S, scratch.Ot, scratch.safe, scratch.rescale);
    }
    first = false;
  }
  if (first) {
    for (int i = 0; i < call.head_dim_v * block.lanes(); ++i) scratch.Ot[i] = 0;
  }

  write_block(call, block, item.split, scratch.statistics, scratch.Ot, scratch.rescale);
}

}  // namespace
}  // namespace flash_attention::cpu
