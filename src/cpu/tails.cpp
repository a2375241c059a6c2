#include "cpu/tails.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace flash_attention::cpu {
namespace {

void clear_rows(const TensorView& view, std::int64_t begin, std::int64_t end, int heads, int dim, std::int64_t size) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (int head = 0; head < heads; ++head) {
      char* const to = view.data + (row * view.seq_stride + head * view.head_stride) * size;
      std::memset(to, 0, static_cast<std::size_t>(dim * size));
    }
  }
}

}  // namespace

void clear_tails(const Call& call, bool backward) {
  if (call.max_logit != nullptr) {
    std::fill_n(call.max_logit, call.batch * call.heads_q, -std::numeric_limits<float>::infinity());
  }
  if (call.cu_seqlens_q == nullptr) return;
  const std::int64_t size = call.dtype == Dtype::float32 ? 4 : 2, begin_q = call.cu_seqlens_q[call.batch];
  if (call.out_tangent.data != nullptr) {
    clear_rows(call.out_tangent, begin_q, call.total_q, call.heads_q, call.head_dim_v, size);
  }
  for (std::int64_t head = 0; call.lse_tangent != nullptr && head < call.heads_q; ++head) {
    float* const row = call.lse_tangent + head * call.total_q;
    std::fill(row + begin_q, row + call.total_q, 0.0f);
  }
  if (!backward) {
    clear_rows(call.out, begin_q, call.total_q, call.heads_q, call.head_dim_v, size);
    for (std::int64_t head = 0; call.lse != nullptr && head < call.heads_q; ++head) {
      float* const row = call.lse + head * call.total_q;
      std::fill(row + begin_q, row + call.total_q, -std::numeric_limits<float>::infinity());
    }
    for (std::int64_t head = 0; call.entropy != nullptr && head < call.heads_q; ++head) {
      float* const row = call.entropy + head * call.total_q;
      std::fill(row + begin_q, row + call.total_q, 0.0f);
    }
    for (std::int64_t head = 0; call.key_mass != nullptr && head < call.heads_q; ++head) {
      float* const row = call.key_mass + head * call.total_kv;
      std::fill(row + call.cu_seqlens_kv[call.batch], row + call.total_kv, 0.0f);
    }
    return;
  }
  const std::int64_t begin_kv = call.cu_seqlens_kv[call.batch];
  clear_rows(call.dq, begin_q, call.total_q, call.heads_q, call.head_dim, size);
  clear_rows(call.dk, begin_kv, call.total_kv, call.heads_kv, call.head_dim, size);
  clear_rows(call.dv, begin_kv, call.total_kv, call.heads_kv, call.head_dim_v, size);
}

}  // namespace flash_attention::cpu
