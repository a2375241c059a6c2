#pragma once

// dsink: a step writes a term for each row, at workspace_offsets[2], and another adds them head by head.

#include "cpu/generic/gradient.h"

namespace flash_attention::cpu {
namespace {

inline std::int64_t sink_term_items(const Call& call) {
  return call.dsink != nullptr ? call.batch * call.heads_kv * blocks_per_head(call) : 0;
}

inline void sink_terms(const Call& call, std::int64_t item, void* /*scratch*/) {
  const std::int64_t head = item / blocks_per_head(call), first_row = item % blocks_per_head(call) * block_q;
  const int kv_head = static_cast<int>(head % call.heads_kv);
  const RowBlock block(call, head / call.heads_kv, kv_head * call.group, call.group, first_row);
  if (block.rows == 0) return;
  RowTerms rows;
  rows.load_terms(call, block);
  float* terms = reinterpret_cast<float*>(call.workspace + call.workspace_offsets[2]);
  for (int lane = 0; lane < block.rows; ++lane) {
    const float share = exp2_one(call.sink[block.head[lane]] * log2_e - rows.lse[lane]);
    terms[block.row_idx(call, lane)] = block.unused[lane] ? 0 : -share * rows.delta[lane];
  }
}

inline std::int64_t sink_items(const Call& call) { return call.dsink != nullptr ? call.heads_q : 0; }

inline void finish_sink(const Call& call, std::int64_t head, void* /*scratch*/) {
  const float* terms = reinterpret_cast<const float*>(call.workspace + call.workspace_offsets[2]);
  const bool packed = call.cu_seqlens_q != nullptr;
  double sum = 0;
  for (std::int64_t batch = 0; batch < (packed ? 1 : call.batch); ++batch) {
    const std::int64_t rows = packed ? call.total_q : call.seq_q;
    for (std::int64_t i = 0; i < rows; ++i) sum += terms[(batch * call.heads_q + head) * rows + i];
  }
  call.dsink[head] = static_cast<float>(sum);
}

}  // namespace
}  // namespace flash_attention::cpu
