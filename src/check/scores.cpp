#include "check/scores.h"

#include <algorithm>
#include <cmath>

#include "check/program_score.h"

namespace flash_attention::check {
namespace {

constexpr double float32_unit = 0x1p-23;  // every kernel adds in it
constexpr double tanh_error = 0x1p-10;    // of the GPU's own tanh

}  // namespace

Scores::Scores(const Call& call, std::int64_t b, std::int64_t head)
    : call_(call),
      p_(call.problem),
      b_(b),
      head_(head),
      sequence_(call.sequence(b)),
      slope_(call.slope(b, head)),
      q_scale_(call.q_scale(b, head)) {}

Score Scores::score(std::int64_t i, std::int64_t j, const double* q, const double* k, double bias) const {
  double dot = 0, size = 0;
  for (std::int64_t d = 0; d < p_.head_dim; ++d) {
    dot += q[d] * k[d];
    size += std::fabs(q[d] * k[d]);
  }
  const double scale = *p_.scale * q_scale_;
  Score s{.i = i, .j = j, .value = scale * dot};
  s.error = float32_unit * (4 + std::sqrt(static_cast<double>(p_.head_dim))) * std::fabs(scale) * size;
  s.error += product_error(p_) * std::fabs(scale) * size;
  if (p_.q_dtype.value_or(p_.dtype) != p_.dtype) s.error += 0x1p-11 * std::fabs(scale) * size;  // 14 bits of 8-bit products
  if (p_.softcap > 0) {
    const Capped cap = capped(p_.softcap, tanh_of(p_.softcap, s.value));
    s.value = cap.value;
    s.derivative = cap.slope;
    s.error += p_.softcap * tanh_error;
    s.derivative_error = 2 * tanh_error;
  }
  bias = bounded_bias(bias);
  const double penalty = alibi_penalty(slope_, sequence_, i, j);
  s.value += bias - penalty;
  s.error += 8 * float32_unit * (std::fabs(bias) + std::fabs(penalty) + std::fabs(s.value));
  if (std::isinf(bias)) s.error = 0;
  return s;
}

void Scores::add(std::vector<Score>& scores, Score s) const {
  if (const ProgramScore* program = call_.program(); program != nullptr) {
    const ProgramScore::Result result = program->at({b_, head_, s.i, s.j}, s.value, s.error);
    if (!result.visible) return;
    s.value = result.score.real;
    s.error = result.score.error;
    s.slope = result.slope.real;
    s.slope_error = result.slope.error;
    s.derivative_error = s.derivative_error * std::fabs(s.slope) + s.slope_error * std::fabs(s.derivative);
    s.derivative *= s.slope;
  }
  scores.push_back(s);
}

std::vector<Score> Scores::of_query(std::int64_t i) const {
  std::vector<Score> scores;
  if (i >= sequence_.len_q) return scores;
  const auto q = call_.read_row(call_.queries(call_.buffers.q, p_.q_strides, p_.head_dim, b_, head_), i);
  std::int64_t begin = sequence_.first_key, end = sequence_.end_key;
  while (begin < end && !sees(i, begin)) ++begin;
  while (begin < end && !sees(i, end - 1)) --end;
  for (std::int64_t first = begin; first < end; first += rows_at_once) {
    const std::int64_t last = std::min(first + rows_at_once, end), count = last - first;
    const auto keys = call_.read_whole_keys(b_, call_.kv_head(head_), first, last);
    std::vector<double> biases(static_cast<std::size_t>(count));
    if (p_.bias.present) biases = call_.read_row(call_.biases(b_, head_, first, count), i);
    std::vector<char> mask(static_cast<std::size_t>(count), 1);
    if (call_.has_masks()) mask = call_.mask(b_, head_, i, i + 1, first, count);
    const std::vector<std::int64_t> listed = call_.listed(b_, head_, i, i + 1, first, count);
    for (std::int64_t n = 0; n < count; ++n) {
      const auto at = static_cast<std::size_t>(n);
      if (mask[at] == 0 || listed[at] == 0) continue;
      const Score once = score(i, first + n, q.data(), &keys[at * p_.head_dim], biases[at]);
      for (std::int64_t time = 0; time < listed[at]; ++time) add(scores, once);
    }
  }
  return scores;
}

std::vector<Score> Scores::of_key(std::int64_t j, std::int64_t begin, std::int64_t end) const {
  std::vector<Score> scores;
  if (j < sequence_.first_key || j >= sequence_.end_key) return scores;
  const auto k = call_.read_keys(call_.buffers.k, p_.k_strides, p_.head_dim, b_, call_.kv_head(head_), j, j + 1);
  const Rows queries = call_.queries(call_.buffers.q, p_.q_strides, p_.head_dim, b_, head_);
  end = std::min(end, sequence_.len_q);
  while (begin < end && !sees(begin, j)) ++begin;
  while (begin < end && !sees(end - 1, j)) --end;
  for (std::int64_t first = begin; first < end; first += rows_at_once) {
    const std::int64_t last = std::min(first + rows_at_once, end), count = last - first;
    const auto q = call_.read(queries, first, last);
    std::vector<double> biases(static_cast<std::size_t>(count));
    if (p_.bias.present) biases = call_.read(call_.biases(b_, head_, j, 1), first, last);
    std::vector<char> mask(static_cast<std::size_t>(count), 1);
    if (call_.has_masks()) mask = call_.mask(b_, head_, first, last, j, 1);
    const std::vector<std::int64_t> listed = call_.listed(b_, head_, first, last, j, 1);
    for (std::int64_t n = 0; n < count; ++n) {
      const auto at = static_cast<std::size_t>(n);
      if (mask[at] == 0 || listed[at] == 0) continue;
      const Score once = score(first + n, j, &q[at * p_.head_dim], k.data(), biases[at]);
      for (std::int64_t time = 0; time < listed[at]; ++time) add(scores, once);
    }
  }
  return scores;
}

}  // namespace flash_attention::check
