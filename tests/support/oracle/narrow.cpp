#include "support/oracle/narrow.h"

#include <algorithm>
#include <random>

#include "support/oracle/case.h"

namespace flash_attention::testing {
namespace {

class Narrowing {
 public:
  Narrowing(const Case& c, const Shape& shape)
      : p_(c.problem), shape_(shape), powers_(c.power_scales), random_(c.seed + 1) {}

  void run(std::vector<double>& values, std::int64_t dim, std::vector<double>& codes, std::vector<double>& scales) {
    const std::int64_t heads = shape_.heads_kv;
    const std::int64_t count = p_.kv_scales == ScaleKind::none     ? 0
                               : p_.kv_scales == ScaleKind::tensor ? 1
                               : p_.kv_scales == ScaleKind::head   ? shape_.batch * heads
                                                                   : shape_.rows_kv * heads;
    for (std::int64_t i = 0; i < count; ++i) scales.push_back(draw_scale());
    codes.resize(values.size());
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      const Shape::Sequence& s = shape_.sequences[b];
      for (std::int64_t row = s.first_kv; row < s.first_kv + s.alloc_kv; ++row) {
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::int64_t which = p_.kv_scales == ScaleKind::tensor ? 0
                                     : p_.kv_scales == ScaleKind::head ? b * heads + head
                                                                       : row * heads + head;
          double* of_row = &values[(row * heads + head) * dim];
          const bool unseen = std::none_of(of_row, of_row + dim, [](double x) { return std::isfinite(x); });
          if (unseen && p_.kv_scales == ScaleKind::token) scales[which] = NAN;
          const double scale = count == 0 ? 1 : scales[which];
          for (std::int64_t d = 0; d < dim; ++d) quantise(of_row[d], codes[(row * heads + head) * dim + d], scale);
        }
      }
    }
  }

  /// Scales of queries are those of a sequence and its key heads.
  void run_queries(std::vector<double>& values, std::vector<double>& codes, std::vector<double>& scales) {
    const std::int64_t heads = shape_.heads_q, kv_heads = shape_.heads_kv, dim = shape_.dim;
    const std::int64_t count = p_.q_scales == ScaleKind::none     ? 0
                               : p_.q_scales == ScaleKind::tensor ? 1
                                                                  : shape_.batch * kv_heads;
    for (std::int64_t i = 0; i < count; ++i) scales.push_back(draw_scale());
    codes.resize(values.size());
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      const Shape::Sequence& s = shape_.sequences[b];
      for (std::int64_t row = s.first_q; row < s.first_q + s.alloc_q; ++row) {
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::int64_t which = p_.q_scales == ScaleKind::tensor ? 0 : b * kv_heads + head / (heads / kv_heads);
          for (std::int64_t d = 0; d < dim; ++d) {
            const std::int64_t at = (row * heads + head) * dim + d;
            quantise(values[at], codes[at], count == 0 ? 1 : scales[which]);
          }
        }
      }
    }
  }

 private:
  double draw_scale() {
    const double exponent = std::uniform_real_distribution<double>(-6, -3)(random_);
    return static_cast<float>(std::exp2(powers_ ? std::round(exponent) : exponent));
  }

  void quantise(double& value, double& code, double scale) const {
    const bool infinity = p_.kv_dtype == Dtype::float8_e5m2;
    if (!std::isfinite(value)) {
      code = std::isinf(value) && infinity ? 0x7c : 0x7f;
      return;
    }
    const std::uint8_t nearest = to_code(*p_.kv_dtype, value / scale);
    code = nearest;
    value = from_code(*p_.kv_dtype, nearest) * scale;
  }

  const Problem& p_;
  const Shape& shape_;
  bool powers_;
  std::mt19937_64 random_;
};

}  // namespace

void make_narrow(const Case& c, const Shape& shape, Inputs& in) {
  if (!c.problem.kv_dtype || size_of(*c.problem.kv_dtype) != 1) return;
  Narrowing narrowing(c, shape);
  narrowing.run(in.k, shape.dim, in.k_codes, in.k_scale);
  narrowing.run(in.v, shape.dim_v, in.v_codes, in.v_scale);
  if (c.problem.q_dtype && size_of(*c.problem.q_dtype) == 1) narrowing.run_queries(in.q, in.q_codes, in.q_scale);
}

}  // namespace flash_attention::testing
