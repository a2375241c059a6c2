#pragma once

// The first step of backward with gradients of key masses. The gradient of a score is P * (dP - delta), in which delta
// is the sum of P * dP over the row's keys. For the output that sum is dot(dO, O). For the masses, whose gradients are
// the same for every row, it is computed here, at CpuRegion::mass_terms:
//
//     term[query] = sum over keys of P[query][key] * dkey_mass[key]

#include "cpu/prefill/key_mass.h"

namespace flash_attention::cpu {
namespace {

inline std::int64_t mass_term_items(const Call& call) {
  return call.dkey_mass == nullptr ? 0 : call.batch * call.heads_q * ceil_div(call.seq_q, block_q);
}

inline void mass_terms(const Call& call, std::int64_t item, void* memory) {
  MassScratch& scratch = *static_cast<MassScratch*>(memory);
  const std::int64_t blocks = ceil_div(call.seq_q, block_q);
  const int head = static_cast<int>(item / blocks % call.heads_q);
  const RowBlock block(call, item / blocks / call.heads_q, head, 1, item % blocks * block_q);
  if (block.rows == 0) return;
  const float* gradient = call.dkey_mass + mass_place(call, block.sequence, block.batch, head);
  float* sum = scratch.sum;
  for (int lane = 0; lane < block.lanes(); ++lane) sum[lane] = 0;
  scratch.rows.load_rows(call, block);
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, false, scratch.K);
    probabilities(call, block, tile, scratch.rows, K, scratch.S);
    for (int key = 0; key < tile.count; ++key) {
      for (int v = 0; v < block.lanes(); v += vector_lanes) {
        const Vec p = load(scratch.S + key * block.lanes() + v);
        store(sum + v, load(sum + v) + select(p == 0.0f, Vec{}, p * gradient[begin + key]));
      }
    }
  }
  float* to = region<float>(call, plan::CpuRegion::mass_terms);
  for (int lane = 0; lane < block.rows; ++lane) to[block.row_idx(call, lane)] = sum[lane];
}

}  // namespace
}  // namespace flash_attention::cpu
