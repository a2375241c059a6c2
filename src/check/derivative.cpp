#include "check/derivative.h"

namespace flash_attention::check {
namespace {

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

}  // namespace

double unit_of(Dtype dtype) { return dtype == Dtype::float32 ? float_unit : dtype == Dtype::float16 ? 0x1p-10 : 0x1p-7; }

double smallest_of(Dtype dtype) { return dtype == Dtype::float16 ? 0x1p-24 : 0x1p-120; }

double underflow_of(Dtype dtype) { return dtype == Dtype::float16 ? 0x1p-23 : 0; }

double sum_error(double terms) { return float_unit * (8 + std::sqrt(terms)); }

double probability(const Score& s, double lse) { return std::isinf(s.value) && s.value < 0 ? 0 : std::exp(s.value - lse); }

Upstream upstream(const Call& call, const double* out, const double* dout, double lse, double dlse) {
  const std::int64_t dim = call.problem.head_dim_v;
  return {lse, dot(dout, out, dim) - dlse, dot_size(dout, out, dim) + std::fabs(dlse)};
}

Derivative by_score(const Call& call, double p, double kept, const Upstream& up, const double* dout, const double* v) {
  const std::int64_t dim = call.problem.head_dim_v;
  const double size = kept * dot_size(dout, v, dim) + up.delta_size;
  return {
      p * (kept * dot(dout, v, dim) - up.delta),
      p * (sum_error(static_cast<double>(dim)) + product_error(call.problem)) * size + underflow_of(call.problem.dtype)};
}

Derivative by_product(const Call& call, const Score& s, double p, double kept, const Upstream& up, const double* dout,
                      const double* v) {
  const double scale = *call.problem.scale;
  const Derivative of_score = by_score(call, p, kept, up, dout, v);
  Derivative d{of_score.value * scale * s.derivative, 0};
  d.error = std::fabs(d.value) * (unit_of(call.problem.dtype) + product_error(call.problem) + 2 * s.error) +
            of_score.error * std::fabs(scale) + std::fabs(of_score.value * scale) * s.derivative_error;
  return d;
}

}  // namespace flash_attention::check
