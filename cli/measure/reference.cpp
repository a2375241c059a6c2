#include "cli/measure/reference.h"

#include <algorithm>

namespace flash_attention::cli {

double Reference::score(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h, double& slope) const {
  double sum = 0;
  for (std::int64_t d = 0; d < dim_; ++d) sum += q(b, i, h, d) * k(b, j, h, d);
  double s = sum * scale();
  slope = 1;
  if (p_.softcap > 0) {
    const double bent = std::tanh(s / p_.softcap);
    s = p_.softcap * bent;
    slope = 1 - bent * bent;
  }
  if (p_.alibi) {
    const double per_key = static_cast<const float*>(work_.alibi_slopes.host())[h];
    s -= per_key * std::fabs(static_cast<double>(i + p_.seq_kv - p_.seq_q - j));
  }
  return s;
}

double Reference::kept(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h) const {
  if (p_.dropout_p == 0) return 1;
  const Options& o = work_.options;
  return dropout_keeps(o.seed, o.offset, p_.dropout_p, b, h, p_.heads_q, i, j) ? 1 / (1 - static_cast<double>(p_.dropout_p))
                                                                               : 0;
}

double Reference::dp(std::int64_t b, std::int64_t i, std::int64_t j, std::int64_t h) const {
  double sum = 0;
  for (std::int64_t d = 0; d < dim_v_; ++d) sum += along_out(work_.dout, b, i, h, d) * v(b, j, h, d);
  return sum * kept(b, i, j, h);
}

Reference::Row Reference::row(std::int64_t b, std::int64_t i, std::int64_t h, bool with_gradient) const {
  Row row{std::vector<double>(static_cast<std::size_t>(dim_v_)), std::vector<double>(static_cast<std::size_t>(dim_)),
          -INFINITY};
  std::vector<std::int64_t> keys;
  std::vector<double> scores, slopes;
  double row_max = -INFINITY;
  for (std::int64_t j = 0; j < p_.seq_kv; ++j) {
    if (!visible(i, j)) continue;
    keys.push_back(j);
    double slope = 1;
    scores.push_back(score(b, i, j, h, slope));
    slopes.push_back(slope);
    row_max = std::max(row_max, scores.back());
  }
  if (keys.empty()) return row;
  double row_sum = 0;
  for (const double s : scores) row_sum += std::exp(s - row_max);
  row.lse = row_max + std::log(row_sum);
  for (std::size_t n = 0; n < keys.size(); ++n) {
    const double weight = std::exp(scores[n] - row.lse) * kept(b, i, keys[n], h);
    if (weight == 0) continue;
    for (std::int64_t d = 0; d < dim_v_; ++d) row.out[static_cast<std::size_t>(d)] += weight * v(b, keys[n], h, d);
  }
  if (!with_gradient) return row;
  double delta = 0;
  for (std::int64_t d = 0; d < dim_v_; ++d)
    delta += row.out[static_cast<std::size_t>(d)] * along_out(work_.dout, b, i, h, d);
  for (std::size_t n = 0; n < keys.size(); ++n) {
    const double ds = std::exp(scores[n] - row.lse) * (dp(b, i, keys[n], h) - delta) * slopes[n] * scale();
    for (std::int64_t d = 0; d < dim_; ++d) row.dq[static_cast<std::size_t>(d)] += ds * k(b, keys[n], h, d);
  }
  return row;
}

void Reference::gradients_of_key(std::int64_t b, std::int64_t j, std::int64_t kv_head, std::vector<double>& dk,
                                 std::vector<double>& dv) const {
  dk.assign(static_cast<std::size_t>(dim_), 0);
  dv.assign(static_cast<std::size_t>(dim_v_), 0);
  const std::int64_t group = p_.heads_q / p_.heads_kv;
  for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (std::int64_t i = 0; i < p_.seq_q; ++i) {
      if (!visible(i, j)) continue;
      double slope = 1;
      const double p = std::exp(score(b, i, j, h, slope) - lse(b, i, h));
      const double weight = p * kept(b, i, j, h);
      double delta = 0;
      for (std::int64_t d = 0; d < dim_v_; ++d) {
        const double gradient = along_out(work_.dout, b, i, h, d);
        delta += gradient * along_out(work_.out, b, i, h, d);
        dv[static_cast<std::size_t>(d)] += weight * gradient;
      }
      const double ds = p * (dp(b, i, j, h) - delta) * slope * scale();
      for (std::int64_t d = 0; d < dim_; ++d) dk[static_cast<std::size_t>(d)] += ds * q(b, i, h, d);
    }
  }
}

}  // namespace flash_attention::cli
