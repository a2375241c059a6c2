#pragma once

// The idea:  the formula, one query after the other: a row of scores, its softmax, the weighted sum of the values.
// From:      the paper. Nothing but loops over floats.
// It buys: a result that is easy to believe. The row of scores is the only memory besides inputs and output.
// The limit: one multiplication at a time, and each waits for the sum before it.

#include <algorithm>
#include <cmath>

#include "cpu/ladder/rows.h"
#include "cpu/region.h"

namespace flash_attention::cpu {
namespace {
namespace c0_scalar {

/// One query of one head.
inline void attend(const Call& call, std::int64_t batch_idx, std::int64_t head_idx, std::int64_t i) {
  const HeadRows Q = head_rows(call.q, batch_idx, head_idx), O = head_rows(call.out, batch_idx, head_idx);
  const HeadRows K = head_rows(call.k, batch_idx, head_idx / call.group);
  const HeadRows V = head_rows(call.v, batch_idx, head_idx / call.group);
  float* S = region<float>(call, plan::CpuRegion::scores_of_row);  // [seq_kv]
  const std::int64_t keys = visible_keys(call, i);

  float row_max = -INFINITY;
  for (std::int64_t j = 0; j < keys; ++j) {
    float sum = 0;
    for (int d = 0; d < call.head_dim; ++d) sum += Q[i][d] * K[j][d];
    S[j] = sum * call.scale;
    row_max = std::max(row_max, S[j]);
  }

  float row_sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    S[j] = std::exp(S[j] - row_max);  // at most 1: the largest score cannot overflow
    row_sum += S[j];
  }

  const float factor = row_sum == 0 ? 0 : 1 / row_sum;
  for (int d = 0; d < call.head_dim; ++d) {
    float sum = 0;
    for (std::int64_t j = 0; j < keys; ++j) sum += S[j] * V[j][d];
    O[i][d] = sum * factor;
  }
  if (call.lse != nullptr) call.lse[(batch_idx * call.heads_q + head_idx) * call.seq_q + i] = row_max + std::log(row_sum);
}

inline std::int64_t items(const Call&) { return 1; }

inline void attention(const Call& call, std::int64_t, void*) {
  for (std::int64_t batch_idx = 0; batch_idx < call.batch; ++batch_idx) {
    for (std::int64_t head_idx = 0; head_idx < call.heads_q; ++head_idx) {
      for (std::int64_t i = 0; i < call.seq_q; ++i) attend(call, batch_idx, head_idx, i);
    }
  }
}

}  // namespace c0_scalar
}  // namespace
}  // namespace flash_attention::cpu
