#include "fuzz/generator/layouts.h"

#include <algorithm>

#include "support/oracle/case.h"

namespace flash_attention::fuzz {
namespace {

/// Elements between the heads, behind the rows and behind the batch entries.
struct Gaps {
  std::int64_t head, row, batch;
};

Strides with_gaps(std::int64_t rows, std::int64_t heads, std::int64_t dim, const Gaps& gaps) {
  const std::int64_t head = dim + gaps.head, row = heads * head + gaps.row;
  return {rows * row + gaps.batch, row, head};
}

Strides heads_first(std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return {heads * rows * dim, dim, rows * dim};
}

Strides strides_of(std::string_view level, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  if (level == "heads_first") return heads_first(rows, heads, dim);
  if (level == "gaps") return with_gaps(rows, heads, dim, {dim % 16 == 0 ? 16 : 8, 16, 48});
  if (level == "odd") return with_gaps(rows, heads, dim, {1, heads % 2 == 0 ? 1 : 2, 5});
  if (level == "fours") return with_gaps(rows, heads, dim, {4, 4, 12});
  if (level == "reversed") {
    const Strides forwards = with_gaps(rows, heads, dim, {0, 16, 0});
    return {-forwards.batch, -forwards.seq, forwards.head};
  }
  return {};
}

}  // namespace

void lay_out(Problem& p, std::string_view level) {
  const std::int64_t rows_q = p.packed ? p.total_q : p.seq_q;
  const std::int64_t rows_kv = p.page_size != 0 ? p.page_size : p.packed ? p.total_kv : p.seq_kv;
  p.q_strides = p.dq_strides = strides_of(level, rows_q, p.heads_q, p.head_dim);
  const std::int64_t dim_k = p.head_dim - (p.latent ? p.head_dim_v : 0);
  p.k_strides = p.dk_strides = strides_of(level, rows_kv, p.heads_kv, dim_k);
  p.v_strides = p.dv_strides = strides_of(level, rows_kv, p.heads_kv, p.head_dim_v);
  p.out_strides = p.dout_strides = strides_of(level, rows_q, p.heads_q, p.head_dim_v);
  if (level != "broadcast") return;
  const auto share = [&](Strides& strides, std::int64_t dim) {
    strides.seq = p.heads_kv * dim, strides.head = dim;
    if (p.page_size != 0) strides.batch = rows_kv * strides.seq;  // pages are not the same
    (p.packed || p.page_size != 0 ? strides.head : strides.batch) = 0;
  };
  share(p.k_strides, dim_k);
  share(p.v_strides, p.head_dim_v);
}

ScoreTensor score_tensor(const Problem& p, std::string_view axes, std::int64_t gap) {
  const auto has = [axes](char axis) { return axes.find(axis) != std::string_view::npos; };
  const std::int64_t keys = testing::packs_keys(p) && p.seq_kv == 0 ? p.total_kv : p.seq_kv;
  const std::int64_t queries = p.packed && p.seq_q == 0 ? p.total_q : p.seq_q;
  ScoreTensor tensor{.present = true};
  std::int64_t size = std::max<std::int64_t>(keys + gap, 1);  // a stride of 0 would be a broadcast
  if (has('q')) tensor.q_stride = size, size *= std::max<std::int64_t>(queries, 1);
  if (has('h')) tensor.head_stride = size, size *= p.heads_q;
  if (has('b')) tensor.batch_stride = size;
  return tensor;
}

}  // namespace flash_attention::fuzz
