#include "check/reference.h"

#include <algorithm>
#include <cmath>

#include "check/scores.h"

namespace flash_attention::check {
namespace {

constexpr double float_unit = 0x1p-23;
constexpr double slack = 3;  // between what errors are in sum and what they may be: no right kernel comes near

/// Distance of neighbouring numbers near 1.
double unit_of(Dtype dtype) { return dtype == Dtype::float32 ? float_unit : dtype == Dtype::float16 ? 0x1p-10 : 0x1p-7; }

/// Distance of neighbouring numbers near 0. Products of bfloat16 on a CPU take what is below its normal numbers as 0.
double smallest_of(Dtype dtype) { return dtype == Dtype::float16 ? 0x1p-24 : 0x1p-120; }

/// What is lost of a probability, at most 1, that becomes a float16 below its normal numbers.
double underflow_of(Dtype dtype) { return dtype == Dtype::float16 ? 0x1p-23 : 0; }

double sum_error(std::size_t terms) { return float_unit * (8 + std::sqrt(static_cast<double>(terms))); }

double dot(const double* a, const double* b, std::int64_t size) {
  double sum = 0;
  for (std::int64_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

double dot_size(const double* a, const double* b, std::int64_t size) {
  double sum = 0;
  for (std::int64_t d = 0; d < size; ++d) sum += std::fabs(a[d] * b[d]);
  return sum;
}

/// Adds factor * row, and the error of the factor and of the sum.
void add(Row& to, double factor, double error, const double* row) {
  for (std::size_t d = 0; d < to.values.size(); ++d) {
    to.values[d] += factor * row[d];
    to.allowed[d] += error * std::fabs(row[d]);
  }
}

void finish(Row& row, Dtype dtype) {
  for (std::size_t d = 0; d < row.values.size(); ++d) {
    row.allowed[d] = slack * (row.allowed[d] + unit_of(dtype) * std::fabs(row.values[d])) + smallest_of(dtype);
  }
}

/// What a query's gradient needs beside its scores.
struct Upstream {
  double lse = 0;
  double delta = 0, delta_size = 0;  // dout . out - dlse
};

Upstream upstream(const Call& call, const double* out, const double* dout, double lse, double dlse) {
  const std::int64_t dim = call.problem.head_dim_v;
  return {lse, dot(dout, out, dim) - dlse, dot_size(dout, out, dim) + std::fabs(dlse)};
}

/// The derivative by scale * q.k, and its error.
struct Derivative {
  double value = 0, error = 0;
};

Derivative derivative(const Call& call, const Score& s, double p, double kept, const Upstream& up, const double* dout,
                      const double* v) {
  const std::int64_t dim = call.problem.head_dim_v;
  const double dp = kept * dot(dout, v, dim), scale = *call.problem.scale;
  const double dp_error = sum_error(static_cast<std::size_t>(dim)) * (kept * dot_size(dout, v, dim) + up.delta_size);
  const double unbent = p * (dp - up.delta) * scale;
  Derivative d{unbent * s.bend, 0};
  d.error = std::fabs(d.value) * (unit_of(call.problem.dtype) + 2 * s.error) + p * dp_error * std::fabs(scale) +
            std::fabs(unbent) * s.tanh_error + underflow_of(call.problem.dtype) * std::fabs(scale);
  return d;
}

/// Rows below it have no gradients: docs/numerics.md.
constexpr double lowest_lse = -1e7;

double probability(const Score& s, double lse) { return std::isinf(s.value) && s.value < 0 ? 0 : std::exp(s.value - lse); }

}  // namespace

QueryResults query_results(const Call& call, std::int64_t b, std::int64_t head, std::int64_t i) {
  const Problem& p = call.problem;
  QueryResults results{Row(p.head_dim_v), Row(1)};
  const Scores of_head(call, b, head);
  const std::vector<Score> scores = of_head.of_query(i);
  double& lse = results.lse.values[0];
  lse = i < of_head.sequence().len_q ? call.sink(head) : -INFINITY;
  double largest = -INFINITY, error = 0;
  for (const Score& s : scores) largest = std::isnan(s.value) ? s.value : std::max(largest, s.value);
  if (std::any_of(scores.begin(), scores.end(), [](const Score& s) { return std::isnan(s.value); })) largest = NAN;
  results.lse.allowed[0] = 4 * float_unit * std::fabs(lse);
  if (std::isinf(largest) && largest < 0) return results;  // no key, or none above -inf

  const double top = std::max(largest, lse);
  double row_sum = std::exp(lse - top);
  for (const Score& s : scores) {
    row_sum += probability(s, top);
    if (s.value > largest - 60) error = std::max(error, s.error);
  }
  lse = std::isnan(largest) ? NAN : top + std::log(row_sum);
  results.lse.allowed[0] = slack * (error + sum_error(scores.size()) + 4 * float_unit * std::fabs(lse)) + 1e-6;

  const double weight_error = unit_of(p.dtype) + 2 * error + sum_error(scores.size());
  constexpr std::size_t block = 512;
  for (std::size_t first = 0; first < scores.size(); first += block) {
    const std::size_t last = std::min(first + block, scores.size());
    const std::int64_t first_key = scores[first].j;
    const auto values =
        call.read_keys(call.buffers.v, p.v_strides, p.head_dim_v, b, call.kv_head(head), first_key, scores[last - 1].j + 1);
    for (std::size_t n = first; n < last; ++n) {
      // Not from lse: beside the lowest biases it has no room for the sum.
      const double kept = call.kept(b, head, i, scores[n].j), weight = probability(scores[n], top) / row_sum * kept;
      const double lost = kept * underflow_of(p.dtype) / std::max(row_sum, 1e-300);
      add(results.out, weight, weight * weight_error + lost, &values[(scores[n].j - first_key) * p.head_dim_v]);
    }
  }
  finish(results.out, p.dtype);
  return results;
}

Row query_gradient(const Call& call, std::int64_t b, std::int64_t head, std::int64_t i) {
  const Problem& p = call.problem;
  Row dq(p.head_dim);
  const std::vector<Score> scores = Scores(call, b, head).of_query(i);
  const double lse = call.read_row(call.statistics(call.buffers.lse, b, head), i)[0];
  if (scores.empty() || lse < lowest_lse) return dq;
  const auto out = call.read_row(call.queries(call.buffers.out, p.out_strides, p.head_dim_v, b, head), i);
  const auto dout = call.read_row(call.queries(call.buffers.dout, p.dout_strides, p.head_dim_v, b, head), i);
  const double dlse = call.buffers.dlse != nullptr ? call.read_row(call.statistics(call.buffers.dlse, b, head), i)[0] : 0;
  const Upstream up = upstream(call, out.data(), dout.data(), lse, dlse);
  const std::int64_t kv_head = call.kv_head(head);
  constexpr std::size_t block = 512;
  for (std::size_t first = 0; first < scores.size(); first += block) {
    const std::size_t last = std::min(first + block, scores.size());
    const std::int64_t begin = scores[first].j, end = scores[last - 1].j + 1;
    const auto keys = call.read_keys(call.buffers.k, p.k_strides, p.head_dim, b, kv_head, begin, end);
    const auto values = call.read_keys(call.buffers.v, p.v_strides, p.head_dim_v, b, kv_head, begin, end);
    for (std::size_t n = first; n < last; ++n) {
      const Score& s = scores[n];
      const double weight = probability(s, lse);
      if (weight == 0) continue;
      const Derivative d =
          derivative(call, s, weight, call.kept(b, head, i, s.j), up, dout.data(), &values[(s.j - begin) * p.head_dim_v]);
      add(dq, d.value, d.error + std::fabs(d.value) * sum_error(scores.size()), &keys[(s.j - begin) * p.head_dim]);
    }
  }
  finish(dq, p.dtype);
  return dq;
}

KeyGradients key_gradients(const Call& call, std::int64_t b, std::int64_t kv_head, std::int64_t j) {
  const Problem& p = call.problem;
  KeyGradients gradients{Row(p.head_dim), Row(p.head_dim_v)};
  const std::int64_t group = p.heads_q / p.heads_kv;
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const std::vector<Score> scores = Scores(call, b, head).of_key(j);
    if (scores.empty()) continue;
    const auto v = call.read_keys(call.buffers.v, p.v_strides, p.head_dim_v, b, kv_head, j, j + 1);
    const double terms = sum_error(scores.size() * static_cast<std::size_t>(group));
    constexpr std::size_t block = 512;
    for (std::size_t first = 0; first < scores.size(); first += block) {
      const std::size_t last = std::min(first + block, scores.size());
      const std::int64_t begin = scores[first].i, end = scores[last - 1].i + 1;
      const auto rows = [&](const void* tensor, const Strides& strides, std::int64_t width) {
        return call.read(call.queries(tensor, strides, width, b, head), begin, end);
      };
      const auto q = rows(call.buffers.q, p.q_strides, p.head_dim);
      const auto out = rows(call.buffers.out, p.out_strides, p.head_dim_v);
      const auto dout = rows(call.buffers.dout, p.dout_strides, p.head_dim_v);
      const auto lse = call.read(call.statistics(call.buffers.lse, b, head), begin, end);
      std::vector<double> dlse(lse.size());
      if (call.buffers.dlse != nullptr) dlse = call.read(call.statistics(call.buffers.dlse, b, head), begin, end);
      for (std::size_t n = first; n < last; ++n) {
        const Score& s = scores[n];
        const auto at = static_cast<std::size_t>(s.i - begin);
        if (lse[at] < lowest_lse) continue;
        const double weight = probability(s, lse[at]), kept = call.kept(b, head, s.i, j);
        if (weight == 0) continue;
        const double* dout_row = &dout[at * p.head_dim_v];
        const Upstream up = upstream(call, &out[at * p.head_dim_v], dout_row, lse[at], dlse[at]);
        const Derivative d = derivative(call, s, weight, kept, up, dout_row, v.data());
        add(gradients.dk, d.value, d.error + std::fabs(d.value) * terms, &q[at * p.head_dim]);
        const double error = weight * (unit_of(p.dtype) + 2 * s.error + terms) + underflow_of(p.dtype);
        add(gradients.dv, weight * kept, error * kept, dout_row);
      }
    }
  }
  finish(gradients.dk, p.dtype);
  finish(gradients.dv, p.dtype);
  return gradients;
}

}  // namespace flash_attention::check
