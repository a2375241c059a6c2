#pragma once

// Shared by the four steps: the rows of a tensor, and the number of keys that a query sees.

#include "cpu/call.h"

namespace flash_attention::cpu {
namespace {

/// The rows of one head of one sequence.
struct HeadRows {
  float* data;
  std::int64_t stride;

  float* operator[](std::int64_t i) const { return data + i * stride; }
};

inline HeadRows head_rows(const TensorView& tensor, std::int64_t batch_idx, std::int64_t head_idx) {
  float* data = reinterpret_cast<float*>(tensor.data);
  return {data + batch_idx * tensor.batch_stride + head_idx * tensor.head_stride, tensor.seq_stride};
}

/// Query i sees the keys before this one: all keys, or under a causal mask the keys up to the diagonal.
inline std::int64_t visible_keys(const Call& call, std::int64_t i) {
  const std::int64_t end = call.window_right < 0 ? call.seq_kv : i + call.seq_kv - call.seq_q + 1;
  return end < 0 ? 0 : end;
}

}  // namespace
}  // namespace flash_attention::cpu
