#include "check/reference.h"

#include <algorithm>
#include <cmath>

#include "check/derivative.h"
#include "check/scores.h"

namespace flash_attention::check {
namespace {

/// Adds factor * row, and the error of the factor and of the sum.
void add(Row& to, double factor, double error, const double* row) {
  for (std::size_t d = 0; d < to.values.size(); ++d) {
    to.values[d] += factor * row[d];
    to.allowed[d] += error * std::fabs(row[d]);
  }
}

void finish(Row& row, Dtype dtype) {
  for (std::size_t d = 0; d < row.values.size(); ++d) {
    row.allowed[d] = allowed_of(row.values[d], row.allowed[d], dtype);
  }
}

}  // namespace

QueryResults query_results(const Call& call, std::int64_t b, std::int64_t head, std::int64_t i) {
  const Problem& p = call.problem;
  QueryResults results{Row(p.head_dim_v), Row(1)};
  const Scores of_head(call, b, head);
  const std::vector<Score> scores = of_head.of_query(i);
  const auto terms = static_cast<double>(scores.size());
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
  results.lse.allowed[0] = slack * (error + sum_error(terms) + 4 * float_unit * std::fabs(lse)) + 1e-6;

  const bool narrow = p.q_dtype.value_or(p.dtype) != p.dtype;  // kernels may round probabilities to e4m3
  const double weight_error = (narrow ? 0x1p-4 : unit_of(p.dtype)) + product_error(p) + 2 * error + sum_error(terms);
  const double underflow = narrow ? 0x1p-16 : underflow_of(p.dtype);
  constexpr std::size_t block = 512;
  for (std::size_t first = 0; first < scores.size(); first += block) {
    const std::size_t last = std::min(first + block, scores.size());
    const std::int64_t first_key = scores[first].j;
    const auto values =
        call.read_keys(call.buffers.v, p.v_strides, p.head_dim_v, b, call.kv_head(head), first_key, scores[last - 1].j + 1);
    for (std::size_t n = first; n < last; ++n) {
      // Not from lse, which has no room for the sum if biases are lowest.
      const double kept = call.kept(b, head, i, scores[n].j), weight = probability(scores[n], top) / row_sum * kept;
      const double lost = kept * underflow / std::max(row_sum, 1e-300);
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
  const auto terms = static_cast<double>(scores.size());
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
          by_product(call, s, weight, call.kept(b, head, i, s.j), up, dout.data(), &values[(s.j - begin) * p.head_dim_v]);
      add(dq, d.value, d.error + std::fabs(d.value) * sum_error(terms), &keys[(s.j - begin) * p.head_dim]);
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
    const double terms = sum_error(static_cast<double>(scores.size()) * static_cast<double>(group));
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
        const Derivative d = by_product(call, s, weight, kept, up, dout_row, v.data());
        add(gradients.dk, d.value, d.error + std::fabs(d.value) * terms, &q[at * p.head_dim]);
        const double error = weight * (unit_of(p.dtype) + product_error(p) + 2 * s.error + terms) + underflow_of(p.dtype);
        add(gradients.dv, weight * kept, error * kept, dout_row);
      }
    }
  }
  finish(gradients.dk, p.dtype);
  finish(gradients.dv, p.dtype);
  return gradients;
}

}  // namespace flash_attention::check
