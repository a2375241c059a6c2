#include "cli/measure/accuracy.h"

#include <algorithm>
#include <cmath>

#include "api/checks/validate.h"
#include "check/reference.h"

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
double allowed_error(const Problem& p, bool gradient) {
  const bool tf32 = p.precision == Precision::tf32;  // has float16's bits
  const double unit = p.dtype == Dtype::bfloat16 ? 1.2e-3 : p.dtype == Dtype::float16 || tf32 ? 1.5e-4 : 1e-6;
  return unit * (gradient ? 20 : 10);
}

/// Row numbers in [0, count), evenly spread, the first and the last included.
std::vector<std::int64_t> some_rows(std::int64_t count, std::int64_t at_most) {
  std::vector<std::int64_t> rows;
  const std::int64_t wanted = std::min(count, at_most);
  for (std::int64_t n = 0; n < wanted; ++n) rows.push_back(wanted == 1 ? 0 : n * (count - 1) / (wanted - 1));
  return rows;
}

/// A workload whose pass has run, as fp64 reads it: device addresses stand for the host's copies.
class Ran {
 public:
  Ran(const Workload& work, Pass pass)
      : problem(api::normalise(work.problem, pass)),
        buffers(work.buffers()),
        call(problem, buffers, work.options, [&work](const void* from, std::size_t, std::vector<char>&) {
          return static_cast<const char*>(on_host(work, from));
        }) {}

  const Problem problem;
  const Buffers buffers;
  const check::Call call;

 private:
  static const void* on_host(const Workload& work, const void* from) {
    for (const Array* array : work.arrays()) {
      const auto offset = static_cast<const char*>(from) - static_cast<const char*>(array->device());
      if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(array->bytes())) {
        return static_cast<const char*>(array->host()) + offset;
      }
    }
    return from;
  }
};

void compare(Comparison& comparison, const std::vector<double>& got, const check::Row& wanted) {
  for (std::size_t d = 0; d < got.size(); ++d) comparison.add(got[d], wanted.values[d]);
}

}  // namespace

std::vector<Accuracy> check_forward(const Workload& work, std::int64_t max_rows) {
  work.out.download();
  work.lse.download();
  const Ran ran(work, Pass::forward);
  const Problem& p = ran.problem;
  const check::Call& call = ran.call;
  const std::int64_t count = p.batch * p.heads_q * p.seq_q;
  const std::vector<std::int64_t> rows = some_rows(count, max_rows);
  const auto checked = static_cast<std::int64_t>(rows.size());
  const bool narrow = p.q_dtype.value_or(p.dtype) != p.dtype;  // probabilities in e4m3, 14 bits of the dot products
  Comparison out("out", narrow ? 5e-2 : allowed_error(p, false), checked, count);
  Comparison lse("lse", narrow ? 1e-3 : p.precision == Precision::tf32 ? 1.5e-3 : 1e-5, checked, count);
  for (const std::int64_t row : rows) {
    const std::int64_t i = row % p.seq_q, head = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
    const check::QueryResults wanted = check::query_results(call, b, head, i);
    compare(lse, call.read_row(call.statistics(ran.buffers.lse, b, head), i), wanted.lse);
    compare(out, call.read_row(call.queries(ran.buffers.out, p.out_strides, p.head_dim_v, b, head), i), wanted.out);
  }
  return {out.result(), lse.result()};
}

std::vector<Accuracy> check_backward(const Workload& work, std::int64_t max_rows) {
  for (const Array* array : {&work.out, &work.lse, &work.dq, &work.dk, &work.dv}) array->download();
  const Ran ran(work, Pass::backward);
  const Problem& p = ran.problem;
  const check::Call& call = ran.call;
  const double allowed = allowed_error(p, true);

  const std::int64_t q_count = p.batch * p.heads_q * p.seq_q, kv_count = p.batch * p.heads_kv * p.seq_kv;
  const std::vector<std::int64_t> q_rows = some_rows(q_count, max_rows), kv_rows = some_rows(kv_count, max_rows);
  Comparison dq("dq", allowed, static_cast<std::int64_t>(q_rows.size()), q_count);
  Comparison dk("dk", allowed, static_cast<std::int64_t>(kv_rows.size()), kv_count);
  Comparison dv("dv", allowed, static_cast<std::int64_t>(kv_rows.size()), kv_count);
  for (const std::int64_t row : q_rows) {
    const std::int64_t i = row % p.seq_q, head = row / p.seq_q % p.heads_q, b = row / p.seq_q / p.heads_q;
    const auto got = call.read_row(call.queries(ran.buffers.dq, p.dq_strides, p.head_dim, b, head), i);
    compare(dq, got, check::query_gradient(call, b, head, i));
  }
  for (const std::int64_t row : kv_rows) {
    const std::int64_t j = row % p.seq_kv, head = row / p.seq_kv % p.heads_kv, b = row / p.seq_kv / p.heads_kv;
    const check::KeyGradients wanted = check::key_gradients(call, b, head, j);
    compare(dk, call.read_keys(ran.buffers.dk, p.dk_strides, p.head_dim, b, head, j, j + 1), wanted.dk);
    compare(dv, call.read_keys(ran.buffers.dv, p.dv_strides, p.head_dim_v, b, head, j, j + 1), wanted.dv);
  }
  return {dq.result(), dk.result(), dv.result()};
}

}  // namespace flash_attention::cli
