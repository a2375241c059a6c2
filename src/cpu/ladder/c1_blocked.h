#pragma once

// The idea:  online softmax over tiles: a block of queries meets 64 keys at a time and keeps a running maximum and sum.
// From c0:   the row of scores becomes a tile in the L1 cache; sums are rescaled; four at a time, none waits for another.
// It buys:   memory no longer grows with the keys, and every K and V row is fetched once for 32 queries, not for each.
// The limit: still one multiplication at a time, on a CPU that can do sixteen with one instruction.

#include <algorithm>
#include <cmath>

#include "cpu/ladder/rows.h"

namespace flash_attention::cpu {
namespace {
namespace c1_blocked {

constexpr int block_q = 32, block_kv = 64, max_dim = 128;

/// Computes a block of queries of one head.
inline void attend(const Call& call, std::int64_t batch_idx, std::int64_t head_idx, std::int64_t q_begin) {
  const HeadRows Q = head_rows(call.q, batch_idx, head_idx), O = head_rows(call.out, batch_idx, head_idx);
  const HeadRows K = head_rows(call.k, batch_idx, head_idx / call.group);
  const HeadRows V = head_rows(call.v, batch_idx, head_idx / call.group);
  float S[block_q][block_kv], sum_O[block_q][max_dim], row_max[block_q], row_sum[block_q];
  const int rows = static_cast<int>(std::min<std::int64_t>(block_q, call.seq_q - q_begin));
  for (int i = 0; i < rows; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0;
    for (int d = 0; d < call.head_dim; ++d) sum_O[i][d] = 0;
  }

  const std::int64_t last_key = visible_keys(call, q_begin + rows - 1);  // later rows see more keys, never fewer
  for (std::int64_t kv_begin = 0; kv_begin < last_key; kv_begin += block_kv) {
    for (int i = 0; i < rows; ++i) {
      const float* q = Q[q_begin + i];
      const std::int64_t left = visible_keys(call, q_begin + i) - kv_begin;
      const int keys = static_cast<int>(std::clamp<std::int64_t>(left, 0, block_kv));
      int j = 0;
      for (; j + 4 <= keys; j += 4) {
        const float *k0 = K[kv_begin + j], *k1 = K[kv_begin + j + 1], *k2 = K[kv_begin + j + 2], *k3 = K[kv_begin + j + 3];
        float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
        for (int d = 0; d < call.head_dim; ++d) {
          sum0 += q[d] * k0[d];
          sum1 += q[d] * k1[d];
          sum2 += q[d] * k2[d];
          sum3 += q[d] * k3[d];
        }
        S[i][j] = sum0 * call.scale;
        S[i][j + 1] = sum1 * call.scale;
        S[i][j + 2] = sum2 * call.scale;
        S[i][j + 3] = sum3 * call.scale;
      }
      for (; j < keys; ++j) {
        float sum = 0;
        for (int d = 0; d < call.head_dim; ++d) sum += q[d] * K[kv_begin + j][d];
        S[i][j] = sum * call.scale;
      }

      // Everything so far was summed relative to row_max. A larger maximum rescales it all by the same factor.
      float new_max = row_max[i];
      for (j = 0; j < keys; ++j) new_max = std::max(new_max, S[i][j]);
      const float rescale = new_max == -INFINITY ? 0 : std::exp(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] *= rescale;
      for (j = 0; j < keys; ++j) {
        S[i][j] = std::exp(S[i][j] - new_max);
        row_sum[i] += S[i][j];
      }

      for (int d = 0; d < call.head_dim; d += 4) {
        float *o = sum_O[i] + d, sum0 = o[0] * rescale, sum1 = o[1] * rescale, sum2 = o[2] * rescale, sum3 = o[3] * rescale;
        for (j = 0; j < keys; ++j) {
          const float p = S[i][j], *v = V[kv_begin + j] + d;
          sum0 += p * v[0];
          sum1 += p * v[1];
          sum2 += p * v[2];
          sum3 += p * v[3];
        }
        o[0] = sum0, o[1] = sum1, o[2] = sum2, o[3] = sum3;
      }
    }
  }

  for (int i = 0; i < rows; ++i) {
    const float factor = row_sum[i] == 0 ? 0 : 1 / row_sum[i];
    for (int d = 0; d < call.head_dim; ++d) O[q_begin + i][d] = sum_O[i][d] * factor;
    if (call.lse == nullptr) continue;
    call.lse[(batch_idx * call.heads_q + head_idx) * call.seq_q + q_begin + i] = row_max[i] + std::log(row_sum[i]);
  }
}

inline std::int64_t items(const Call&) { return 1; }

inline void attention(const Call& call, std::int64_t, void*) {
  for (std::int64_t batch_idx = 0; batch_idx < call.batch; ++batch_idx) {
    for (std::int64_t head_idx = 0; head_idx < call.heads_q; ++head_idx) {
      for (std::int64_t q_begin = 0; q_begin < call.seq_q; q_begin += block_q) attend(call, batch_idx, head_idx, q_begin);
    }
  }
}

}  // namespace c1_blocked
}  // namespace
}  // namespace flash_attention::cpu
