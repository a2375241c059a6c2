#include "support/oracle/narrow.h"

#include <algorithm>
#include <array>
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

/// Keys and values in 4 bits: scales that fit a group's largest number, others that are too small or too large for it, and
/// a few that are next to nothing.
class Grouping {
 public:
  explicit Grouping(const Case& c) : p_(c.problem), random_(c.seed + 2) {
    if (p_.kv_scales != ScaleKind::none) tensor_scale_ = 0.3125f;
  }

  void run(std::vector<double>& values, std::vector<double>& codes, std::vector<double>& tensor_scales,
           std::vector<double>& scales, std::vector<double>& zeros) {
    const std::int64_t group = columns_of_group(*p_.kv_dtype, p_.kv_group);
    if (p_.kv_scales != ScaleKind::none) tensor_scales.push_back(tensor_scale_);
    codes.resize(values.size() / 2);
    for (std::int64_t at = 0; at < static_cast<std::int64_t>(values.size()); at += group)
      quantise(&values[at], group, &codes[at / 2], scales, zeros);
  }

 private:
  void quantise(double* x, std::int64_t count, double* codes, std::vector<double>& scales, std::vector<double>& zeros) {
    const Dtype format = *p_.kv_dtype;
    const bool integers = format == Dtype::int4,
               nan = std::any_of(x, x + count, [](double v) { return !std::isfinite(v); });
    double scale = NAN, zero = integers ? NAN : 0, stored = integers ? NAN : format == Dtype::mxfp4 ? 255 : 0x7f;
    if (!nan) {
      const auto [low, high] = std::minmax_element(x, x + count);
      const double wide = integers ? (*high - *low) / 15 : std::max(std::fabs(*low), std::fabs(*high)) / 6 / tensor_scale_;
      const double wanted = wide * std::array{1.0, 1.0, 1.0, 0.5, 2.0, 1e-3}[random_() % 6];
      if (integers) {
        zero = round_to(p_.dtype, *low);
        scale = stored = round_to(p_.dtype, wanted);
      } else if (format == Dtype::nvfp4) {
        stored = to_code(Dtype::float8_e4m3, wanted);
      } else {
        const bool half = p_.dtype == Dtype::float16;
        stored =
            wanted > 0 ? std::clamp(127 + std::ceil(std::log2(wanted)), half ? 103.0 : 0.0, half ? 142.0 : 254.0) : 127;
      }
      if (!integers) scale = from_scale(format, static_cast<std::uint8_t>(stored));
    }
    for (std::int64_t d = 0; d < count; d += 2) codes[d / 2] = 0;
    for (std::int64_t d = 0; d < count; ++d) {
      const double number = integers ? (x[d] - zero) / scale : x[d] / (scale * tensor_scale_);
      const int code = nan ? static_cast<int>(random_() % 16) : scale == 0 ? 5 : to_nibble(format, number);
      codes[d / 2] += code << d % 2 * 4;
      x[d] = from_group(format, p_.dtype, code, scale, zero) * tensor_scale_;
    }
    scales.push_back(stored);
    if (integers) zeros.push_back(zero);
  }

  const Problem& p_;
  std::mt19937_64 random_;
  double tensor_scale_ = 1;
};

}  // namespace

void make_narrow(const Case& c, const Shape& shape, Inputs& in) {
  if (!c.problem.kv_dtype || size_of(*c.problem.kv_dtype) != 1) return;
  if (has_groups(*c.problem.kv_dtype)) {
    Grouping grouping(c);
    grouping.run(in.k, in.k_codes, in.k_scale, in.k_group_scale, in.k_group_zero);
    grouping.run(in.v, in.v_codes, in.v_scale, in.v_group_scale, in.v_group_zero);
    return;
  }
  Narrowing narrowing(c, shape);
  narrowing.run(in.k, shape.dim, in.k_codes, in.k_scale);
  narrowing.run(in.v, shape.dim_v, in.v_codes, in.v_scale);
  if (c.problem.q_dtype && size_of(*c.problem.q_dtype) == 1) narrowing.run_queries(in.q, in.q_codes, in.q_scale);
}

}  // namespace flash_attention::testing
