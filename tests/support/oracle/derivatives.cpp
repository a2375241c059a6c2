#include "support/oracle/derivatives.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <sstream>

#include "support/oracle/memory.h"
#include "support/oracle/rounding.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

using Part = std::vector<double> Inputs::*;
constexpr Part with_tangents[] = {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::bias, &Inputs::sink};

using Result = std::vector<double> Results::*;
struct Named {
  const char* name;
  Result part;
};
constexpr Named gradients[] = {{"dq", &Results::dq},
                               {"dk", &Results::dk},
                               {"dv", &Results::dv},
                               {"dbias", &Results::dbias},
                               {"dsink", &Results::dsink}};

Inputs moved(const Inputs& in, const Inputs& tangents, double step) {
  Inputs at = in;
  for (const Part part : with_tangents) {
    for (std::size_t x = 0; x < (at.*part).size(); ++x) (at.*part)[x] += step * (tangents.*part)[x];
  }
  return at;
}

}  // namespace

Inputs draw_tangents(const Case& c, const Inputs& in) {
  std::mt19937_64 random(c.seed + 77);
  std::normal_distribution<double> normal;
  Inputs tangents;
  for (const Part part : with_tangents) {
    const Dtype dtype = part == &Inputs::bias   ? c.problem.bias.dtype
                        : part == &Inputs::sink ? Dtype::float32
                                                : c.problem.dtype;
    for (const double x : in.*part) {
      double t = round_to(dtype, normal(random));
      if (part == &Inputs::bias || part == &Inputs::sink) {
        if (std::fabs(x) > 1e30) t = 0;  // finite ones are bounded there, and infinite ones hide
      } else if (!std::isfinite(x)) {
        t = NAN;
      }
      (tangents.*part).push_back(t);
    }
  }
  return tangents;
}

Results derivatives(const Case& c, const Inputs& in, const Inputs& tangents, Pass pass) {
  constexpr double step = 1e-4;
  const bool backward = pass == Pass::second;
  Results at[4];
  constexpr double places[] = {-2, -1, 1, 2}, weights[] = {1.0 / 12, -8.0 / 12, 8.0 / 12, -1.0 / 12};
  for (int n = 0; n < 4; ++n) at[n] = oracle(c, moved(in, tangents, places[n] * step), backward);
  Results want = oracle(c, in, false);
  const auto differentiate = [&](Result from, Result to) {
    std::vector<double> found((at[0].*from).size());
    for (std::size_t x = 0; x < found.size(); ++x) {
      if (std::isinf((at[0].*from)[x])) continue;  // lse of an empty row
      for (int n = 0; n < 4; ++n) found[x] += weights[n] / step * (at[n].*from)[x];
    }
    want.*to = std::move(found);
  };
  differentiate(&Results::out, &Results::out_tangent);
  differentiate(&Results::lse, &Results::lse_tangent);
  if (!backward) return want;
  for (const Named& gradient : gradients) differentiate(gradient.part, gradient.part);
  return want;
}

Outcome attempt_derivatives(const Case& c, const Target& target, const Inputs& in, const Inputs& tangents) {
  const std::unique_ptr<Memory> memory = memory_of(target.device);
  Tensors tensors(c, in, *memory);
  tensors.add_tangents(tangents);
  const bool backward = target.pass == Pass::second;
  if (backward) {
    Results exact = oracle(c, in, false);
    for (double& x : exact.out) x = round_to(c.problem.dtype, x);
    tensors.set_forward(exact);
  }
  Buffers b = tensors.buffers();
  if (!backward) {
    b.dout = nullptr, b.dlse = nullptr;
    b.dq = b.dk = b.dv = b.dbias = nullptr;
    b.dsink = nullptr;
  }
  Options options{.device = target.device, .seed = c.dropout_seed, .offset = c.dropout_offset, .kernel = target.kernel};
  options.workspace_bytes = workspace_bytes(c.problem, target.pass, options);
  if (options.workspace_bytes > 0) {
    options.workspace = memory->allocate(options.workspace_bytes);
    const std::vector<unsigned char> dirt(options.workspace_bytes, 0xff);  // nobody may rely on a clean one
    memory->write(options.workspace, dirt.data(), dirt.size());
  }
  (backward ? second : tangent)(c.problem, b, options);
  return {tensors.read(backward), tensors.written_gap()};
}

std::vector<std::string> wrong_derivatives(const Case& c, const Results& got, const Results& want, bool rounds_weights,
                                           const Results& more) {
  std::vector<std::string> lines;
  const auto compare = [&](const char* name, Result part, Dtype dtype) {
    const std::vector<double>&g = got.*part, &w = want.*part;
    if (w.empty()) return;
    if (g.size() != w.size()) {
      lines.push_back(std::string(name) + ": has " + std::to_string(g.size()) + " elements");
      return;
    }
    // Sums are in float whatever the type, of terms that may be larger than what is left of them by the size of lse., and
    // probabilities made from lse are right to |lse| 2^-24.
    const double terms = std::max(largest_of(w), 1.0) * (1 + largest_of(want.lse_tangent));
    const double rounding = rounds_weights && part != &Results::lse_tangent ? 2 * epsilon(c.problem.dtype) : 0;
    const double allowed = std::max(epsilon(dtype), rounding) * largest_of(w) + (100 + largest_of(want.lse)) * epsilon(Dtype::float32) * terms;
    for (std::size_t x = 0; x < w.size() && lines.size() < 6; ++x) {
      const double beside = (more.*part).empty() ? 0 : (more.*part)[x];
      if (std::isnan(w[x]) ? std::isnan(g[x]) : std::fabs(g[x] - w[x]) <= allowed + beside) continue;
      std::ostringstream text;
      text << name << '[' << x << "]: got " << g[x] << ", want " << w[x] << ", allowed error " << allowed;
      lines.push_back(text.str());
    }
  };
  compare("out_tangent", &Results::out_tangent, c.problem.dtype);
  compare("lse_tangent", &Results::lse_tangent, Dtype::float32);
  for (const Named& gradient : gradients) {
    const bool scores = gradient.part == &Results::dbias;
    compare(gradient.name, gradient.part,
            gradient.part == &Results::dsink ? Dtype::float32
            : scores                         ? c.problem.bias.dtype
                                             : c.problem.dtype);
  }
  return lines;
}

Results rounding_of_second(const Case& c, const Inputs& in, const Inputs& tangents) {
  Case with_bias = c;  // whose gradient is that of the scores
  Problem& p = with_bias.problem;
  const std::int64_t keys = p.seq_kv, pairs = p.seq_q * keys, dim = p.head_dim;
  p.bias = {.present = true, .batch_stride = p.heads_q * pairs, .head_stride = pairs, .q_stride = keys};
  with_bias.dbias = true;
  Inputs at = in, along = tangents, of_lse = in;
  at.bias = along.bias = of_lse.bias = std::vector<double>(static_cast<std::size_t>(p.batch * p.heads_q * pairs), 0.0);
  const std::vector<double> dS2 = derivatives(with_bias, at, along, Pass::second).dbias, dS = oracle(with_bias, at, true).dbias;
  with_bias.dlse = true;  // the gradient of lse by a score is its probability
  of_lse.dout.assign(in.dout.size(), 0.0);
  of_lse.dlse.assign(static_cast<std::size_t>(p.batch * p.heads_q * p.seq_q), 1.0);
  const std::vector<double> P = oracle(with_bias, of_lse, true).dbias;

  const double scale = 1 / std::sqrt(static_cast<double>(dim)), unit = epsilon(p.dtype);
  const auto row_of = [&](const std::vector<double>& tensor, std::int64_t b, std::int64_t length, std::int64_t row,
                          std::int64_t h) { return tensor.data() + ((b * length + row) * p.heads_q + h) * dim; };
  const auto dot = [&](const double* x, const double* y) { return std::inner_product(x, x + dim, y, 0.0); };
  const auto size = [](double x) { return std::fabs(x); };
  Results bounds;
  bounds.dq.assign(in.q.size(), 0.0), bounds.dk.assign(in.k.size(), 0.0);
  for (std::int64_t n = 0; n < p.batch * p.heads_q * p.seq_q; ++n) {
    const std::int64_t b = n / p.seq_q / p.heads_q, h = n / p.seq_q % p.heads_q, i = n % p.seq_q;
    const double *q = row_of(in.q, b, p.seq_q, i, h), *q_t = row_of(tangents.q, b, p.seq_q, i, h);
    const double* dout = row_of(in.dout, b, p.seq_q, i, h);
    const auto of_row = [&](const std::vector<double>& scores) { return scores.data() + n * keys; };
    std::vector<double> t(static_cast<std::size_t>(keys));  // tangents of scores, then less their mean
    double mean = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      double& of_key = t[static_cast<std::size_t>(j)];
      of_key = scale * (dot(q_t, row_of(in.k, b, keys, j, h)) + dot(q, row_of(tangents.k, b, keys, j, h)));
      mean += of_row(P)[j] * of_key;
    }
    double of_delta = 0, of_rest = 0;  // errors of the row's numbers, from those of out and of its tangent
    for (std::int64_t j = 0; j < keys; ++j) {
      double& of_key = t[static_cast<std::size_t>(j)];
      of_key -= mean;
      const double *v = row_of(in.v, b, keys, j, h), *v_t = row_of(tangents.v, b, keys, j, h);
      for (std::int64_t d = 0; d < dim; ++d) {
        const double weight = unit * of_row(P)[j] * size(dout[d]);
        of_delta += weight * size(v[d]), of_rest += weight * (size(of_key * v[d]) + size(v_t[d]));
      }
    }
    for (std::int64_t j = 0; j < keys; ++j) {
      const double of_key = size(t[static_cast<std::size_t>(j)]);
      const double of_score = unit * size(of_row(dS2)[j]) + of_row(P)[j] * (of_key * of_delta + of_rest);
      const double of_tangent = unit * size(of_row(dS)[j]) + of_row(P)[j] * of_delta;
      const double *k = row_of(in.k, b, keys, j, h), *k_t = row_of(tangents.k, b, keys, j, h);
      double* dq = bounds.dq.data() + (q - in.q.data());
      double* dk = bounds.dk.data() + (k - in.k.data());
      for (std::int64_t d = 0; d < dim; ++d) {
        dq[d] += scale * (of_score * size(k[d]) + of_tangent * size(k_t[d]));
        dk[d] += scale * (of_score * size(q[d]) + of_tangent * size(q_t[d]));
      }
    }
  }
  return bounds;
}

}  // namespace flash_attention::testing
