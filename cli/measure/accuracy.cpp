#include "cli/measure/accuracy.h"

#include <algorithm>
#include <cmath>

#include "cli/measure/element.h"
#include "cli/measure/reference.h"

namespace flash_attention::cli {
namespace {

/// Collects the differences of one tensor.
class Comparison {
 public:
  Comparison(std::string tensor, double allowed, std::int64_t rows, std::int64_t of_rows) {
    result_.tensor = std::move(tensor);
    result_.allowed = allowed;
    result_.rows = rows;
    result_.of_rows = of_rows;
  }
  void add(double got, double wanted) {
    if (got == wanted) return add_difference(0, wanted);  // equal infinities, too
    add_difference(std::isfinite(got) && std::isfinite(wanted) ? got - wanted : INFINITY, wanted);
  }
  Accuracy result() const {
    Accuracy result = result_;
    // A reference that is zero but for fp64's roundings (the gradients of queries that see one key) has no size:
    // its differences are measured against the inputs, whose rms is 1.
    const double size = wanted_ > 1e-20 * count_ ? wanted_ : count_;
    if (differences_ > 0) result.relative_rms = std::sqrt(differences_ / size);
    return result;
  }

 private:
  void add_difference(double difference, double wanted) {
    result_.max_error = std::max(result_.max_error, std::fabs(difference));
    differences_ += difference * difference;
    count_ += 1;
    if (std::isfinite(wanted)) wanted_ += wanted * wanted;
  }
  Accuracy result_;
  double differences_ = 0, wanted_ = 0, count_ = 0;
};

/// Bounds on the relative rms error: some 20 roundings of the element type for a forward pass, twice that for gradients.
double allowed_error(Dtype dtype, bool gradient) {
  const double unit = dtype == Dtype::float32 ? 1e-6 : dtype == Dtype::float16 ? 1.5e-4 : 1.2e-3;
  return unit * (gradient ? 20 : 10);
}

/// Row numbers in [0, count), evenly spread, the first and the last included.
std::vector<std::int64_t> some_rows(std::int64_t count, std::int64_t at_most) {
  std::vector<std::int64_t> rows;
  const std::int64_t wanted = std::min(count, at_most);
  for (std::int64_t n = 0; n < wanted; ++n) rows.push_back(wanted == 1 ? 0 : n * (count - 1) / (wanted - 1));
  return rows;
}

}  // namespace

std::vector<Accuracy> check_forward(const Workload& work, std::int64_t max_rows) {
  work.out.download();
  work.lse.download();
  const Problem& p = work.problem;
  const Reference reference(work);
  const std::int64_t count = p.batch * p.heads_q * p.seq_q;
  const std::vector<std::int64_t> rows = some_rows(count, max_rows);
  const auto checked = static_cast<std::int64_t>(rows.size());
  const bool narrow = p.q_dtype.value_or(p.dtype) != p.dtype;  // probabilities in e4m3, 14 bits of the dot products
  Comparison out("out", narrow ? 5e-2 : allowed_error(p.dtype, false), checked, count);
  Comparison lse("lse", narrow ? 1e-3 : allowed_error(Dtype::float32, false), checked, count);
  for (const std::int64_t row : rows) {
    const std::int64_t i = row % p.seq_q, h = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
    const Reference::Row wanted = reference.row(b, i, h, false);
    lse.add(reference.lse(b, i, h), wanted.lse);
    for (std::size_t d = 0; d < wanted.out.size(); ++d) {
      out.add(reference.along_out(work.out, b, i, h, static_cast<std::int64_t>(d)), wanted.out[d]);
    }
  }
  return {out.result(), lse.result()};
}

std::vector<Accuracy> check_backward(const Workload& work, std::int64_t max_rows) {
  for (const Array* array : {&work.out, &work.lse, &work.dq, &work.dk, &work.dv}) array->download();
  const Problem& p = work.problem;
  const Reference reference(work);
  const double allowed = allowed_error(p.dtype, true);

  const std::int64_t q_count = p.batch * p.heads_q * p.seq_q, kv_count = p.batch * p.heads_kv * p.seq_kv;
  const std::vector<std::int64_t> q_rows = some_rows(q_count, max_rows), kv_rows = some_rows(kv_count, max_rows);
  Comparison dq("dq", allowed, static_cast<std::int64_t>(q_rows.size()), q_count);
  Comparison dk("dk", allowed, static_cast<std::int64_t>(kv_rows.size()), kv_count);
  Comparison dv("dv", allowed, static_cast<std::int64_t>(kv_rows.size()), kv_count);
  for (const std::int64_t row : q_rows) {
    const std::int64_t i = row % p.seq_q, h = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
    const Reference::Row wanted = reference.row(b, i, h, true);
    for (std::size_t d = 0; d < wanted.dq.size(); ++d) {
      const std::int64_t index = ((b * p.seq_q + i) * p.heads_q + h) * p.head_dim + static_cast<std::int64_t>(d);
      dq.add(load(work.dq.host(), p.dtype, index), wanted.dq[d]);
    }
  }
  std::vector<double> wanted_dk, wanted_dv;
  for (const std::int64_t row : kv_rows) {
    const std::int64_t j = row % p.seq_kv, h = row / p.seq_kv % p.heads_kv, b = row / p.seq_kv / p.heads_kv;
    reference.gradients_of_key(b, j, h, wanted_dk, wanted_dv);
    const std::int64_t position = (b * p.seq_kv + j) * p.heads_kv + h;
    const auto compare = [&](Comparison& comparison, const Array& array, const std::vector<double>& wanted) {
      const auto width = static_cast<std::int64_t>(wanted.size());
      for (std::int64_t d = 0; d < width; ++d) {
        comparison.add(load(array.host(), p.dtype, position * width + d), wanted[static_cast<std::size_t>(d)]);
      }
    };
    compare(dk, work.dk, wanted_dk);
    compare(dv, work.dv, wanted_dv);
  }
  return {dq.result(), dk.result(), dv.result()};
}

}  // namespace flash_attention::cli
