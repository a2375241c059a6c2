#include "support/case.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "support/rounding.h"

namespace flash_attention::testing {
namespace {

std::int64_t longest_q(const Problem& p) { return p.packed && p.seq_q == 0 ? p.total_q : p.seq_q; }
std::int64_t longest_kv(const Problem& p) { return p.packed && p.page_size == 0 && p.seq_kv == 0 ? p.total_kv : p.seq_kv; }

}  // namespace

Shape::Shape(const Case& c) {
  const Problem& p = c.problem;
  batch = p.batch;
  heads_q = p.heads_q;
  heads_kv = p.heads_kv;
  group = heads_q / heads_kv;
  dim = p.head_dim;
  dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
  rows_q = p.packed ? p.total_q : p.batch * p.seq_q;
  const bool packed_kv = p.packed && p.page_size == 0;  // in pages, sequences lie apart: b has rows b * seq_kv and on
  rows_kv = packed_kv ? p.total_kv : p.batch * p.seq_kv;
  seq_q = longest_q(p);
  seq_kv = longest_kv(p);
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence s;
    s.first_q = p.packed ? c.cu_seqlens_q[b] : b * p.seq_q;
    s.first_kv = packed_kv ? c.cu_seqlens_kv[b] : b * p.seq_kv;
    s.alloc_q = p.packed ? c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b] : p.seq_q;
    s.alloc_kv = packed_kv ? c.cu_seqlens_kv[b + 1] - c.cu_seqlens_kv[b] : p.seq_kv;
    s.len_q = p.seqused_q ? c.seqused_q[b] : s.alloc_q;
    s.len_kv = p.seqused_kv ? c.seqused_kv[b] : s.alloc_kv;
    s.visible_kv = p.key_lengths ? std::min<std::int64_t>(s.len_kv, c.key_lengths[b]) : s.len_kv;
    s.padding_kv = p.left_padding ? c.left_padding[b] : 0;
    sequences.push_back(s);
  }
}

bool Shape::visible(const Problem& p, const Sequence& s, std::int64_t i, std::int64_t j) const {
  const std::int64_t diagonal = p.alignment == Alignment::bottom_right ? i + s.len_kv - s.len_q : i;
  const std::int64_t right = p.causal ? 0 : p.window_right;
  return i < s.len_q && j >= s.padding_kv && j < s.visible_kv && (p.window_left < 0 || j >= diagonal - p.window_left) &&
         (right < 0 || j <= diagonal + right);
}

std::int64_t score_index(const Case& c, const ScoreTensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                         std::int64_t j) {
  const Problem& p = c.problem;
  const std::int64_t heads = t.head_stride ? p.heads_q : 1, rows = t.q_stride ? longest_q(p) : 1;
  return (((t.batch_stride ? b : 0) * heads + (t.head_stride ? h : 0)) * rows + (t.q_stride ? i : 0)) * longest_kv(p) + j;
}

std::int64_t score_elements(const Case& c, const ScoreTensor& t) {
  const Problem& p = c.problem;
  return (t.batch_stride ? p.batch : 1) * (t.head_stride ? p.heads_q : 1) * (t.q_stride ? longest_q(p) : 1) * longest_kv(p);
}

std::int64_t lse_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t i) {
  return c.problem.packed ? h * shape.rows_q + shape.sequences[b].first_q + i : (b * shape.heads_q + h) * shape.seq_q + i;
}

namespace {

/// What no query sees must not matter, whatever it holds.
void poison_unseen(const Case& c, const Shape& shape, Inputs& in) {
  std::vector<bool> key_seen(shape.rows_kv), query_used(shape.rows_q);
  for (const Shape::Sequence& s : shape.sequences) {
    for (std::int64_t i = 0; i < s.len_q; ++i) {
      query_used[s.first_q + i] = true;
      for (std::int64_t j = 0; j < s.visible_kv; ++j) {
        if (shape.visible(c.problem, s, i, j)) key_seen[s.first_kv + j] = true;
      }
    }
  }
  const auto poison = [](std::vector<double>& values, std::int64_t row, std::int64_t width) {
    for (std::int64_t x = 0; x < width; ++x) values[row * width + x] = (row + x) % 3 == 0 ? INFINITY : NAN;
  };
  for (std::int64_t row = 0; row < shape.rows_kv; ++row) {
    if (key_seen[row]) continue;
    poison(in.k, row, shape.heads_kv * shape.dim);
    poison(in.v, row, shape.heads_kv * shape.dim_v);
  }
  for (std::int64_t row = 0; row < shape.rows_q; ++row) {
    if (query_used[row]) continue;
    poison(in.q, row, shape.heads_q * shape.dim);
    poison(in.dout, row, shape.heads_q * shape.dim_v);
  }
}

}  // namespace

Inputs draw_inputs(const Case& c) {
  const Problem& p = c.problem;
  const Shape shape(c);
  std::mt19937_64 random(c.seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::int64_t count, Dtype dtype, double spread = 1) {
    std::vector<double> values(count);
    for (double& x : values) x = round_to(dtype, spread * normal(random));
    return values;
  };
  Inputs in;
  in.q = draw(shape.rows_q * shape.heads_q * shape.dim, p.dtype);
  in.k = draw(shape.rows_kv * shape.heads_kv * shape.dim, p.dtype);
  in.v = draw(shape.rows_kv * shape.heads_kv * shape.dim_v, p.dtype);
  in.dout = draw(shape.rows_q * shape.heads_q * shape.dim_v, p.dtype);
  if (c.dlse) in.dlse = draw(shape.rows_q * shape.heads_q, Dtype::float32);
  if (p.bias.present) in.bias = draw(score_elements(c, p.bias), p.bias.dtype);
  for (std::int64_t x = 0; c.infinite_bias && x < static_cast<std::int64_t>(in.bias.size()); ++x) {
    const std::int64_t i = x / shape.seq_kv % shape.seq_q, j = x % shape.seq_kv;
    if (i % 8 == 1 || (i % 8 == 2 && j < 70) || (i % 8 == 3 && j >= 60) || (i % 8 == 4 && j % 3 != 0))
      in.bias[x] = -INFINITY;
  }
  if (p.alibi) {
    in.alibi_slopes = draw((p.alibi_batch_stride ? shape.batch : 1) * shape.heads_q, Dtype::float32);
    for (double& slope : in.alibi_slopes) slope = static_cast<float>(std::fabs(slope) * 0.1);
  }
  if (p.sink) in.sink = draw(shape.heads_q, Dtype::float32, 2);
  for (std::int64_t h = 0; p.sink && c.infinite_sink && h < shape.heads_q; h += 2) in.sink[h] = -INFINITY;
  if (p.mask.present) {
    in.mask.resize(score_elements(c, p.mask));
    for (std::size_t x = 0; x < in.mask.size(); ++x) {
      const bool hidden_row = (x / shape.seq_kv) % 7 == 3;  // some rows see nothing
      in.mask[x] = !hidden_row && random() % 4 != 0;
    }
  }

  // Along the first coordinate of Q and K lies the part that shapes the scores.
  const double root = p.scale ? 1 / *p.scale : std::sqrt(static_cast<double>(shape.dim));
  for (std::int64_t row = 0; row < shape.rows_q && c.draw != Draw::normal; ++row) {
    for (std::int64_t h = 0; h < shape.heads_q; ++h)
      in.q[(row * shape.heads_q + h) * shape.dim] = round_to(p.dtype, row % 2 && c.draw == Draw::large ? -4 : 4);
  }
  for (std::int64_t row = 0; row < shape.rows_kv && c.draw != Draw::normal; ++row) {
    const std::int64_t j = p.packed && p.page_size == 0 ? row : row % shape.seq_kv;
    for (std::int64_t h = 0; h < shape.heads_kv; ++h) {
      double& lead = in.k[(row * shape.heads_kv + h) * shape.dim];
      switch (c.draw) {
        case Draw::normal:
          break;
        case Draw::large:
          lead = 120 * root / 4;
          break;
        case Draw::peaked:
          lead = j % 16 == 5 ? 25 * root / 4 : 0;
          break;
        case Draw::growing:
          lead = 1.5 * static_cast<double>(j) * root / 4;
          break;
        case Draw::spike:
          lead = j + 2 == shape.seq_kv ? 110 * root / 4 : 0;
          break;
      }
      lead = round_to(p.dtype, lead);
    }
  }
  const auto share = [&](std::vector<double>& values, const Strides& strides) {  // one tensor for the whole batch
    if (p.packed || p.page_size != 0 || strides.batch != 0 || shape.batch == 0) return;
    const std::int64_t size = static_cast<std::int64_t>(values.size()) / shape.batch;
    for (std::int64_t x = size; x < static_cast<std::int64_t>(values.size()); ++x) values[x] = values[x % size];
  };
  share(in.k, p.k_strides);
  share(in.v, p.v_strides);
  for (const Shape::Sequence& s : shape.sequences) {
    const auto plant = [&](std::vector<double>& values, std::int64_t j, std::int64_t width) {
      if (j >= 0 && j < s.alloc_kv) std::fill_n(&values[(s.first_kv + j) * width], width, NAN);
    };
    const auto plant_row = [&](std::vector<double>& values, std::int64_t i, std::int64_t width) {
      if (i >= 0 && i < s.alloc_q) std::fill_n(&values[(s.first_q + i) * width], width, NAN);
    };
    plant_row(in.q, c.nan_query, shape.heads_q * shape.dim);
    plant_row(in.dout, c.nan_dout, shape.heads_q * shape.dim_v);
    plant(in.k, c.nan_key, shape.heads_kv * shape.dim);
    plant(in.v, c.nan_value, shape.heads_kv * shape.dim_v);
  }
  poison_unseen(c, shape, in);
  return in;
}

}  // namespace flash_attention::testing
