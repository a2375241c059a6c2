#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cli/measure/element.h"
#include "cli/measure/workload.h"
#include "cli/problem/mask_flag.h"

namespace flash_attention::cli {

/// Reads the dense tensors of a workload as fp64 and knows the scores.
class Reference {
 public:
  explicit Reference(const Workload& work)
      : work_(work),
        p_(work.problem),
        mask_(mask_of(p_)),
        dim_(p_.head_dim),
        dim_v_(p_.head_dim_v != 0 ? p_.head_dim_v : p_.head_dim) {}

  double q(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) const {
    const std::int64_t which = p_.q_scales == ScaleKind::head ? b * p_.heads_kv + kv(h) : 0;
    const double scale =
        p_.q_scales == ScaleKind::none ? 1 : double{static_cast<const float*>(work_.q_scale.host())[which]};
    return load(work_.q.host(), p_.q_dtype.value_or(p_.dtype), ((b * p_.seq_q + i) * p_.heads_q + h) * dim_ + d) * scale;
  }
  double k(std::int64_t b, std::int64_t j, std::int64_t h, std::int64_t d) const {
    const std::int64_t row = key_row(b, j) * p_.heads_kv + kv(h);
    return load(work_.k.host(), p_.kv_dtype.value_or(p_.dtype), row * dim_ + d) * scale_of(work_.k_scale, b, row);
  }
  double v(std::int64_t b, std::int64_t j, std::int64_t h, std::int64_t d) const {
    const std::int64_t row = key_row(b, j) * p_.heads_kv + kv(h);
    return load(work_.v.host(), p_.kv_dtype.value_or(p_.dtype), row * dim_v_ + d) * scale_of(work_.v_scale, b, row);
  }
  double along_out(const Array& array, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) const {
    return load(array.host(), p_.dtype, ((b * p_.seq_q + i) * p_.heads_q + h) * dim_v_ + d);
  }
  double lse(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<const float*>(work_.lse.host())[(b * p_.heads_q + h) * p_.seq_q + i];
  }

  bool visible(std::int64_t i, std::int64_t j) const {
    const std::int64_t distance = j - i - (p_.alignment == Alignment::bottom_right ? p_.seq_kv - p_.seq_q : 0);
    const std::int64_t right = p_.causal ? 0 : p_.window_right;
    if (mask_ && !mask_->shows(i, j)) return false;
    if (const std::int64_t size = p_.attention_chunk, place = j - distance; size > 0) {
      if (place < 0 || place / size != j / size) return false;
    }
    return (right < 0 || distance <= right) && (p_.window_left < 0 || -distance <= p_.window_left);
  }

  /// The score before the mask; `slope` is its derivative with respect to scale * q.k (softcap bends it).
  double score(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h, double& slope) const;

  /// What dropout multiplies a probability with.
  double kept(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h) const;

  struct Row {
    std::vector<double> out;
    std::vector<double> dq;
    double lse = -INFINITY;
  };

  /// One query's row of out, lse and, where dout is given, dq.
  Row row(std::int64_t b, std::int64_t i, std::int64_t h, bool with_gradient) const;

  /// One key's rows of dk and dv.
  void gradients_of_key(std::int64_t b, std::int64_t j, std::int64_t kv_head, std::vector<double>& dk,
                        std::vector<double>& dv) const;

 private:
  /// Of 8-bit K or V; `row` counts rows and heads.
  double scale_of(const Array& scales, std::int64_t b, std::int64_t row) const {
    if (p_.kv_scales == ScaleKind::none) return 1;
    const std::int64_t head = b * p_.heads_kv + row % p_.heads_kv;
    const std::int64_t which = p_.kv_scales == ScaleKind::tensor ? 0 : p_.kv_scales == ScaleKind::head ? head : row;
    return static_cast<const float*>(scales.host())[which];
  }
  std::int64_t key_row(std::int64_t b, std::int64_t j) const {
    if (p_.page_size == 0) return b * p_.seq_kv + j;
    const auto* table = static_cast<const std::int32_t*>(work_.page_table.host());
    return table[b * p_.page_table_stride + j / p_.page_size] * p_.page_size + j % p_.page_size;
  }
  std::int64_t kv(std::int64_t h) const { return h / (p_.heads_q / p_.heads_kv); }
  double scale() const { return p_.scale ? static_cast<double>(*p_.scale) : 1 / std::sqrt(static_cast<double>(dim_)); }
  double dp(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h) const;

  const Workload& work_;
  const Problem& p_;
  std::optional<MaskFlag> mask_;
  std::int64_t dim_, dim_v_;
};

}  // namespace flash_attention::cli
