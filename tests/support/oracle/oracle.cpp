#include "support/oracle/oracle.h"

#include <algorithm>
#include <cmath>

#include "check/formula.h"
#include "support/clones.h"
#include "support/oracle/case_programs.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

FLASH_ATTENTION_CLONES void add(double* __restrict to, double factor, const double* __restrict from, std::int64_t count) {
  for (std::int64_t x = 0; x < count; ++x) to[x] += factor * from[x];
}

/// The same with sums in float beside it, and the squares of those.
FLASH_ATTENTION_CLONES void add_rounded(double* __restrict sum, double* __restrict exact, double* __restrict squares,
                                        double factor, const double* __restrict from, std::int64_t count) {
  for (std::int64_t x = 0; x < count; ++x) {
    sum[x] = static_cast<float>(sum[x] + factor * from[x]);
    exact[x] += factor * from[x];
    squares[x] += sum[x] * sum[x];
  }
}

class Oracle {
 public:
  Oracle(const Case& c, const Inputs& in, bool backward, std::optional<Dtype> rounding)
      : c_(c), p_(c.problem), in_(in), shape_(c), backward_(backward), rounding_(rounding) {
    scale_ = p_.scale ? *p_.scale : 1 / std::sqrt(static_cast<double>(shape_.dim));
    r_.out.assign(shape_.rows_q * shape_.heads_q * shape_.dim_v, 0);
    r_.lse.assign(shape_.rows_q * shape_.heads_q, -INFINITY);
    if (p_.return_max_logit) r_.max_logit.assign(shape_.batch * shape_.heads_q, -INFINITY);
    if (p_.return_key_mass) r_.key_mass.assign(mass_elements(c, shape_), 0);
    if (p_.return_entropy) r_.entropy.assign(shape_.rows_q * shape_.heads_q, 0);
    if (!backward_) return;
    r_.dq.assign(in.q.size(), 0);
    r_.dk.assign(in.k.size(), 0);
    r_.dv.assign(in.v.size(), 0);
    if (c.dbias) r_.dbias.assign(in.bias.size(), 0), dbias_squares_.assign(in.bias.size(), 0);
    if (c.dsink) r_.dsink.assign(shape_.heads_q, 0);
    if (c.dprogram) r_.dprogram.assign(in.program_reals.size(), 0), dprogram_squares_ = r_.dprogram;
    if (c.draw == Draw::ties) dk_squares_.assign(in.k.size() / shape_.dim, 0);
  }

  Results run() {
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      for (std::int64_t h = 0; h < shape_.heads_q; ++h) {
        const Shape::Sequence& s = shape_.sequences[b];
        const std::int64_t first = s.first_kv * shape_.heads_kv + h / shape_.group;
        if (h % shape_.group == 0) {
          keys_.set(in_.k.data() + first * shape_.dim, shape_.heads_kv * shape_.dim, s.visible_kv, shape_.dim);
          if (backward_)
            values_.set(in_.v.data() + first * shape_.dim_v, shape_.heads_kv * shape_.dim_v, s.visible_kv, shape_.dim_v);
        }
        for (std::int64_t i = 0; i < shape_.sequences[b].len_q; ++i) row(b, h, i);
      }
    }
    for (double squares : dbias_squares_) r_.dbias_spread = std::max(r_.dbias_spread, std::sqrt(squares));
    for (double squares : dprogram_squares_) r_.dprogram_spread = std::max(r_.dprogram_spread, std::sqrt(squares));
    const bool whole = std::all_of(r_.dprogram.begin(), r_.dprogram.end(), [](double x) { return std::isfinite(x); });
    if (!whole) std::fill(r_.dprogram.begin(), r_.dprogram.end(), NAN);
    for (double squares : dk_squares_) r_.dk_spread = std::max(r_.dk_spread, std::sqrt(squares));
    const auto round_all = [&](std::vector<double>& values) {
      if (rounding_)
        for (double& x : values) x = round_to(*rounding_, x);
    };
    for (auto* values : {&r_.out, &r_.dq, &r_.dk, &r_.dv, &r_.dbias}) round_all(*values);
    return std::move(r_);
  }

 private:
  /// Rows of keys or of values, transposed: element x of all rows lies together.
  struct Columns {
    std::vector<double> elements;
    std::int64_t rows = 0, dim = 0;

    void set(const double* first, std::int64_t row_stride, std::int64_t row_count, std::int64_t width) {
      rows = row_count, dim = width;
      elements.resize(rows * dim);
      for (std::int64_t j = 0; j < rows; ++j) {
        for (std::int64_t x = 0; x < dim; ++x) elements[x * rows + j] = first[j * row_stride + x];
      }
    }
  };

  /// Products of one vector with every row, and the squares of their partial sums.
  struct Products {
    std::vector<double> sum, exact, squares;
  };

  /// Each sum goes over the elements from the first to the last; all rows go along together because that is quick, those
  /// that nobody sees, too.
  void multiply(const double* vector, const Columns& columns, Products& out) const {
    for (std::vector<double>* values : {&out.sum, &out.exact, &out.squares}) values->assign(columns.rows, 0);
    double *sum = out.sum.data(), *exact = out.exact.data(), *squares = out.squares.data();
    for (std::int64_t x = 0; x < columns.dim; ++x) {
      const double* column = columns.elements.data() + x * columns.rows;
      const double factor = vector[x];
      if (rounding_)
        add_rounded(sum, exact, squares, factor, column, columns.rows);
      else
        add(exact, factor, column, columns.rows);
    }
    if (!rounding_) out.sum = out.exact;
  }

  /// What is left of a probability, relative to the largest of its row, in e4m3. A kernel's reference may lie below the
  /// largest score, so that even the largest probability is rounded, by up to 2^-4 (docs/numerics.md): here it is 66, which
  /// is half as wrong, and the yardstick counts twice.
  double weight(double p) const {
    if (!rounding_ || !c_.narrow_products || !std::isfinite(p)) return p;
    if (p == 0) return 0;
    const double unit = 66, last_place = std::exp2(std::max(std::floor(std::log2(p * unit)), -6.0) - 3);
    return std::nearbyint(p * unit / last_place) * last_place / unit;
  }
  double rounded(double x) const { return rounding_ ? round_to(*rounding_, x) : x; }
  static double largest(const double* row, std::int64_t count) {
    return std::fabs(*std::max_element(row, row + count, [](double a, double b) { return std::fabs(a) < std::fabs(b); }));
  }
  double accumulated(double x) const { return rounding_ ? static_cast<float>(x) : x; }
  /// The size that the rounding errors of a sum in float have together, from the squares of its partial sums. The errors
  /// of one order of summation may cancel by luck, and where the sum is subtracted from its equal nothing else is left:
  /// the yardstick is moved by their size.
  double spread(double squares) const { return rounding_ ? 0x1p-24 * std::sqrt(squares) : 0; }
  /// The same of a score. Of 8-bit products tensor cores keep 14 bits of a sum on its way, and cut the rest off: errors of
  /// one sign, which add up.
  double score_spread(double squares) const { return (c_.narrow_products ? 0x1p11 : 1) * spread(squares); }

  void row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const Shape::Sequence& s = shape_.sequences[b];
    const double* q = &in_.q[((s.first_q + i) * shape_.heads_q + h) * shape_.dim];
    const auto key = [&](std::int64_t j) { return ((s.first_kv + j) * shape_.heads_kv + h / shape_.group) * shape_.dim; };
    const auto value = [&](std::int64_t j) {
      return ((s.first_kv + j) * shape_.heads_kv + h / shape_.group) * shape_.dim_v;
    };

    std::vector<std::int64_t> keys;
    std::vector<double> score, exact_score, tanh_score;
    std::vector<ProgramScore> program;
    multiply(q, keys_, products_);
    for (std::int64_t j = 0; j < s.visible_kv; ++j) {
      if (!shape_.visible(p_, s, i, j)) continue;
      if (p_.mask.present && !in_.mask[score_index(c_, p_.mask, b, h, i, j)]) continue;
      if (hidden_by_rows(c_, shape_, in_, b, h, i, j) || hidden_by_blocks(c_, in_, b, h, i, j)) continue;
      if (hidden_by_bits(c_, shape_, in_, b, i, j)) continue;
      if (!program_shows(c_, in_, b, h, i, j)) continue;
      const std::int64_t times = times_listed(c_, shape_, in_, b, h, i, j);
      if (times == 0) continue;
      // A shift of all keys together would cancel.
      const double dot = products_.sum[j] + (j % 2 == 0 ? 1 : -1) * score_spread(products_.squares[j]);
      double value_of = scale_ * dot, exact = scale_ * products_.exact[j];
      double t = 0;
      if (p_.softcap > 0) {
        t = accumulated(check::tanh_of(p_.softcap, value_of));
        value_of = check::capped(p_.softcap, t).value;
        exact = check::capped(p_.softcap, check::tanh_of(p_.softcap, exact)).value;
      }
      const double capped = value_of;
      if (p_.bias.present) value_of += check::bounded_bias(in_.bias[score_index(c_, p_.bias, b, h, i, j)]);
      if (p_.alibi) {
        const double slope = in_.alibi_slopes[(p_.alibi_batch_stride ? b * shape_.heads_q : 0) + h];
        value_of -= check::alibi_penalty(slope, s.extent(), i, j);
      }
      exact += value_of - capped;
      if (c_.program != CaseProgram::none) {
        program.push_back(program_score(c_, in_, value_of, h, i, j, rounding_.has_value()));
        value_of = program.back().value, exact = program_score(c_, in_, exact, h, i, j, false).value;
      }
      for (std::int64_t time = 0; time < times; ++time) {
        keys.push_back(j);
        // A float holds a score to a unit of its last place, wherever softcap, bias and ALiBi have moved it.
        score.push_back(accumulated(value_of) * (rounding_ ? 1 + (j % 2 == 0 ? 0x1p-23 : -0x1p-23) : 1));
        exact_score.push_back(exact);
        tanh_score.push_back(t);
      }
    }

    double largest = p_.sink ? in_.sink[h] : -INFINITY;
    for (double x : score) largest = std::isnan(x) || x > largest ? x : largest;
    if (largest == -INFINITY) return;  // no key is visible, or none has a score above -inf
    double sum = p_.sink ? std::exp(in_.sink[h] - largest) : 0;
    for (double x : score) sum += std::exp(x - largest);
    const double lse = largest + std::log(sum);
    r_.lse[lse_index(c_, shape_, b, h, i)] = lse;
    statistics(b, h, i, keys, score, largest, sum);

    double* out = &r_.out[((s.first_q + i) * shape_.heads_q + h) * shape_.dim_v];
    if (std::isnan(lse)) std::fill_n(out, shape_.dim_v, NAN);  // whatever dropout takes away
    std::vector<double> p(keys.size()), kept(keys.size());
    for (std::size_t n = 0; n < keys.size(); ++n) {
      p[n] = weight(std::exp(score[n] - largest)) / sum;  // lse may have no room for the sum beside the maximum
      if (!c_.narrow_products) p[n] = rounded(p[n]);
      kept[n] = check::kept_factor(p_, c_.dropout_seed, c_.dropout_offset, b, h, i, keys[n]);
      if (kept[n] != 0) add(out, p[n] * kept[n], &in_.v[value(keys[n])], shape_.dim_v);
    }
    if (!backward_ || lse < check::lowest_lse) return;
    // Backward is given the exact out and lse, so its own P does not sum to exactly 1.
    std::vector<double> exact_out(shape_.dim_v);
    double exact_sum = p_.sink ? std::exp(in_.sink[h] - largest) : 0;
    for (double x : exact_score) exact_sum += std::exp(x - largest);
    const double exact_lse = accumulated(largest + std::log(exact_sum));  // it comes as a float
    for (std::size_t n = 0; n < keys.size(); ++n) {
      const double weight = std::exp(exact_score[n] - exact_lse) * kept[n];
      if (kept[n] != 0) add(exact_out.data(), weight, &in_.v[value(keys[n])], shape_.dim_v);
      p[n] = rounded(std::exp(score[n] - exact_lse));
    }
    gradients(b, h, i, keys, p, kept, tanh_score, program, exact_out.data(), exact_lse, q, key, value);
  }

  /// The sums of docs/numerics.md, with each probability by itself.
  void statistics(std::int64_t b, std::int64_t h, std::int64_t i, const std::vector<std::int64_t>& keys,
                  const std::vector<double>& score, double largest, double sum) {
    const double lse = largest + std::log(sum);
    for (std::size_t n = 0; n < keys.size(); ++n) {
      if (score[n] == -INFINITY) continue;
      if (p_.return_max_logit) {
        double& most = r_.max_logit[b * shape_.heads_q + h];
        if (std::isnan(score[n]) || score[n] > most) most = score[n];
      }
      const double p = std::exp(score[n] - largest) / sum;
      if (p_.return_key_mass && !(lse < check::lowest_lse)) r_.key_mass[mass_index(c_, shape_, b, h, keys[n])] += p;
      if (p_.return_entropy && p != 0) r_.entropy[lse_index(c_, shape_, b, h, i)] -= p * (score[n] - largest - std::log(sum));
    }
  }

  /// The gradient of a probability by way of the statistics.
  double of_statistics(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, double p) const {
    double dp = 0;
    if (p_.return_key_mass) dp += in_.dkey_mass[mass_index(c_, shape_, b, h, j)];
    if (p_.return_entropy && p != 0) dp -= in_.dentropy[lse_index(c_, shape_, b, h, i)] * (std::log(p) + 1);
    return dp;
  }

  template <class Key, class Value>
  void gradients(std::int64_t b, std::int64_t h, std::int64_t i, const std::vector<std::int64_t>& keys,
                 const std::vector<double>& p, const std::vector<double>& kept, const std::vector<double>& tanh_score,
                 const std::vector<ProgramScore>& program, const double* out, double lse, const double* q, Key key,
                 Value value) {
    const Shape::Sequence& s = shape_.sequences[b];
    const double* dout = &in_.dout[((s.first_q + i) * shape_.heads_q + h) * shape_.dim_v];
    double* dq = &r_.dq[((s.first_q + i) * shape_.heads_q + h) * shape_.dim];
    const double dlse = c_.dlse ? in_.dlse[lse_index(c_, shape_, b, h, i)] : 0;
    double delta = 0, exact_delta = 0, delta_squares = 0, out_squares = 0;
    // From the last to the first: sums in float depend on their order, and nobody promises that of dp.
    for (std::int64_t x = shape_.dim_v - 1; x >= 0; --x) {
      delta = accumulated(delta + dout[x] * rounded(out[x]));
      exact_delta += dout[x] * out[x];
      delta_squares += delta * delta;
      const double of_out = rounding_ ? epsilon(*rounding_) / epsilon(Dtype::float32) * dout[x] * out[x] : 0;
      out_squares += of_out * of_out;
    }
    const bool has_statistics = p_.return_key_mass || p_.return_entropy;
    double delta_of_statistics = 0;
    for (std::size_t n = 0; has_statistics && n < keys.size(); ++n) {
      if (p[n] != 0) delta_of_statistics += p[n] * of_statistics(b, h, i, keys[n], p[n]);
    }
    multiply(dout, values_, products_);
    for (std::size_t n = 0; n < keys.size(); ++n) {
      const std::int64_t j = keys[n];
      if (kept[n] != 0) add(&r_.dv[value(j)], rounded(p[n] * kept[n]), dout, shape_.dim_v);
      const double dp = kept[n] != 0 ? products_.sum[j] * kept[n] : 0, squares = products_.squares[j];
      const double exact_dp = kept[n] != 0 ? products_.exact[j] * kept[n] : 0;
      double ds = dp - delta + dlse;
      if (has_statistics && p[n] != 0) ds += of_statistics(b, h, i, j, p[n]) - delta_of_statistics;
      const double dp_squares = kept[n] != 0 ? squares * kept[n] * kept[n] : 0;
      const double error = spread(dp_squares + delta_squares);
      // What a sum over many rows may be off by: each row's out has been rounded by itself.
      const double of_rows = spread(dp_squares + delta_squares + out_squares);
      // What the rounding of out has moved, it moves for everyone: the errors of the sums do not make up for it.
      const double moved = dp - exact_dp - (delta - exact_delta);
      ds = p[n] * (ds + std::copysign(error, moved != 0 ? moved : ds));
      const double through = program.empty() ? 1 : program[n].slope;
      if (c_.dprogram) {
        r_.dprogram[program[n].element] += ds * program[n].by_element;
        const double each = p[n] * of_rows * program[n].by_element;
        if (rounding_ && std::isfinite(ds)) dprogram_squares_[program[n].element] += each * each;
      }
      ds *= through;
      if (c_.dbias) {
        const std::int64_t at = score_index(c_, p_.bias, b, h, i, j);
        r_.dbias[at] += ds;
        if (rounding_ && std::isfinite(ds)) dbias_squares_[at] += std::pow(p[n] * of_rows * through, 2);
      }
      const double slope = p_.softcap > 0 ? check::capped(p_.softcap, tanh_score[n]).slope : 1;
      ds = rounded(ds * slope) * scale_;
      if (c_.draw == Draw::ties && rounding_ && std::isfinite(ds)) {
        const double each = p[n] * of_rows * through * slope * scale_ * largest(q, shape_.dim);
        dk_squares_[static_cast<std::size_t>(key(j) / shape_.dim)] += each * each;
      }
      add(dq, ds, &in_.k[key(j)], shape_.dim);
      add(&r_.dk[key(j)], ds, q, shape_.dim);
    }
    if (c_.dsink) r_.dsink[h] += std::exp(in_.sink[h] - lse) * (dlse - delta - delta_of_statistics);
  }

  const Case& c_;
  const Problem& p_;
  const Inputs& in_;
  const Shape shape_;
  const bool backward_;
  const std::optional<Dtype> rounding_;
  double scale_;
  Columns keys_, values_;  // of the head that is worked on
  Products products_;
  std::vector<double> dbias_squares_, dprogram_squares_;
  std::vector<double> dk_squares_;  // of each key, where all its elements are one sum
  Results r_;
};

}  // namespace

Results oracle(const Case& c, const Inputs& in, bool backward, std::optional<Dtype> rounding) {
  return Oracle(c, in, backward, rounding).run();
}

}  // namespace flash_attention::testing
