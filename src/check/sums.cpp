#include "check/sums.h"

#include <algorithm>
#include <cmath>

#include "check/derivative.h"
#include "check/sample.h"

namespace flash_attention::check {
namespace {

/// Out, dout and related data of rows [begin, end) of a head.
class Upstreams {
 public:
  Upstreams(const Call& call, std::int64_t b, std::int64_t head, std::int64_t begin, std::int64_t end)
      : call_(call), begin_(begin) {
    const Problem& p = call.problem;
    out_ = call.read(call.queries(call.buffers.out, p.out_strides, p.head_dim_v, b, head), begin, end);
    dout_ = call.read(call.queries(call.buffers.dout, p.dout_strides, p.head_dim_v, b, head), begin, end);
    lse_ = call.read(call.statistics(call.buffers.lse, b, head), begin, end);
    dlse_.resize(lse_.size());
    if (call.buffers.dlse != nullptr) dlse_ = call.read(call.statistics(call.buffers.dlse, b, head), begin, end);
  }

  const double* dout(std::int64_t i) const { return &dout_[(i - begin_) * call_.problem.head_dim_v]; }
  Upstream of(std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i - begin_);
    return upstream(call_, &out_[(i - begin_) * call_.problem.head_dim_v], dout(i), lse_[at], dlse_[at]);
  }

 private:
  const Call& call_;
  std::int64_t begin_;
  std::vector<double> out_, dout_, lse_, dlse_;
};

/// A sum in float of many terms.
struct Sum {
  double value = 0, size = 0, errors = 0, terms = 0;

  void add(double term, double error) {
    value += term;
    size += std::fabs(term);
    errors += error;
    ++terms;
  }
  Row finish(Dtype dtype) const {
    Row row(1);
    row.values[0] = value;
    row.allowed[0] = allowed_of(value, errors + size * sum_error(terms), dtype);
    return row;
  }
};

/// The sizes of dbias.
struct BiasAxes {
  explicit BiasAxes(const Problem& p)
      : batch(p.bias.batch_stride != 0 ? p.batch : 1),
        heads(p.bias.head_stride != 0 ? p.heads_q : 1),
        queries(p.bias.q_stride != 0 ? p.seq_q : 1),
        keys(p.seq_kv) {}
  std::int64_t batch, heads, queries, keys;

  std::int64_t count() const { return batch * heads * queries * keys; }
  BiasPlace place(std::int64_t index) const {
    const std::int64_t row = index / keys;
    return {row / queries / heads, row / queries % heads, row % queries, index % keys, index};
  }
};

void add_head(Sum& sum, const Call& call, std::int64_t b, std::int64_t head, const BiasPlace& place) {
  const Problem& p = call.problem;
  const bool one_query = p.bias.q_stride != 0;
  const Scores of_head(call, b, head);
  const std::int64_t end = one_query ? place.i + 1 : of_head.sequence().len_q;
  const std::vector<Score> scores = of_head.of_key(place.j, place.i, end);
  if (scores.empty()) return;
  const auto v = call.read_keys(call.buffers.v, p.v_strides, p.head_dim_v, b, call.kv_head(head), place.j, place.j + 1);
  for (auto first = scores.begin(); first != scores.end();) {
    auto last = first;
    while (last != scores.end() && last->i < first->i + rows_at_once) ++last;
    const Upstreams rows(call, b, head, first->i, (last - 1)->i + 1);
    for (; first != last; ++first) {
      const Upstream up = rows.of(first->i);
      const double weight = up.lse < lowest_lse ? 0 : probability(*first, up.lse);
      if (weight == 0) continue;
      const Derivative d = by_score(call, weight, call.kept(b, head, first->i, place.j), up, rows.dout(first->i), v.data());
      const double error = d.error + std::fabs(d.value) * (unit_of(p.dtype) + 2 * first->error);
      sum.add(d.value * first->slope, error * std::fabs(first->slope) + std::fabs(d.value) * first->slope_error);
    }
  }
}

}  // namespace

std::vector<BiasPlace> some_biases(const Call& call, std::uint64_t seed) {
  const Problem& p = call.problem;
  const BiasAxes axes(p);
  const double pairs =
      static_cast<double>(p.batch / std::max<std::int64_t>(axes.batch, 1)) * static_cast<double>(p.heads_q / axes.heads);
  const double rows = static_cast<double>(p.bias.q_stride != 0 ? 1 : p.seq_q);
  const double work = pairs * (work_of_pair + rows * static_cast<double>(2 * p.head_dim + 4 * p.head_dim_v));
  std::vector<BiasPlace> places;
  for (const std::int64_t index : some_of(axes.count(), seed, work, 8)) places.push_back(axes.place(index));
  return places;
}

Row bias_gradient(const Call& call, const BiasPlace& place) {
  const Problem& p = call.problem;
  const std::int64_t first_b = p.bias.batch_stride != 0 ? place.b : 0,
                     end_b = p.bias.batch_stride != 0 ? place.b + 1 : p.batch;
  const std::int64_t first_head = place.head, end_head = p.bias.head_stride != 0 ? place.head + 1 : p.heads_q;
  Sum sum;
  for (std::int64_t b = first_b; b < end_b; ++b) {
    for (std::int64_t head = first_head; head < end_head; ++head) add_head(sum, call, b, head, place);
  }
  return sum.finish(p.bias.dtype);
}

std::vector<std::int64_t> some_sinks(const Call& call, std::uint64_t seed) {
  const Problem& p = call.problem;
  const double rows = static_cast<double>(p.total_q) * static_cast<double>(2 * p.head_dim_v);
  return some_of(p.heads_q, seed, work_of_pair * static_cast<double>(p.batch) + rows, 4);
}

Row sink_gradient(const Call& call, std::int64_t head) {
  const double sink = call.sink(head);
  Sum sum;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const std::int64_t len_q = call.sequence(b).len_q;
    for (std::int64_t first = 0; first < len_q; first += rows_at_once) {
      const std::int64_t last = std::min(first + rows_at_once, len_q);
      const Upstreams rows(call, b, head, first, last);
      for (std::int64_t i = first; i < last; ++i) {
        const Upstream up = rows.of(i);
        const double weight = up.lse < lowest_lse ? 0 : std::exp(sink - up.lse);
        if (weight == 0) continue;
        const double of_weight = 4 * float_unit * (1 + std::fabs(sink) + std::fabs(up.lse));
        const double of_delta = sum_error(static_cast<double>(call.problem.head_dim_v)) * up.delta_size;
        sum.add(-weight * up.delta, weight * (of_delta + of_weight * std::fabs(up.delta)));
      }
    }
  }
  return sum.finish(Dtype::float32);
}

}  // namespace flash_attention::check
