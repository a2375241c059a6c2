#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/oracle/case.h"

namespace flash_attention::testing {

/// batch 2, 2 heads, prime lengths that are no multiple of any tile.
inline Case base(const char* name, Dtype dtype) {
  Case c;
  c.name = name;
  c.problem = {.batch = 2, .seq_q = 67, .seq_kv = 131, .heads_q = 2, .heads_kv = 2, .head_dim = 64, .dtype = dtype};
  c.seed = std::hash<std::string>{}(c.name);
  return c;
}

/// Strides of a score tensor that has the named axes and broadcasts the others.
inline ScoreTensor over(const Problem& p, bool batch, bool head, bool q, Dtype dtype = Dtype::float32) {
  const std::int64_t rows = q ? p.seq_q : 1, heads = head ? p.heads_q : 1;
  return {.present = true,
          .dtype = dtype,
          .batch_stride = batch ? heads * rows * p.seq_kv : 0,
          .head_stride = head ? rows * p.seq_kv : 0,
          .q_stride = q ? p.seq_kv : 0};
}

inline void pack(Case& c, std::vector<std::int32_t> lengths_q, std::vector<std::int32_t> lengths_kv) {
  const auto running = [](const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> cu{0};
    for (std::int32_t length : lengths) cu.push_back(cu.back() + length);
    return cu;
  };
  Problem& p = c.problem;
  p.packed = true;
  p.batch = static_cast<std::int64_t>(lengths_q.size());
  c.cu_seqlens_q = running(lengths_q);
  c.cu_seqlens_kv = running(lengths_kv);
  p.total_q = c.cu_seqlens_q.back();
  p.total_kv = c.cu_seqlens_kv.back();
  p.seq_q = *std::max_element(lengths_q.begin(), lengths_q.end());
  p.seq_kv = *std::max_element(lengths_kv.begin(), lengths_kv.end());
}

}  // namespace flash_attention::testing
