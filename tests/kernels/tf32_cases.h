#pragma once

#include <cmath>
#include <limits>

#include "kernels/emulated.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {

/// The cases with float32 on tensor cores.
inline std::vector<Case> fast(std::vector<Case> cases) {
  for (Case& c : cases) c.problem.precision = Precision::fast;
  return cases;
}

/// Problems in which products count: several tiles, long dot products, large logits, a row that one key dominates; rows
/// that are computed again, because of a NaN that they do not see.
inline std::vector<Case> accuracy_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t head_dim, Draw draw, float scale = 0) {
    Case c;
    c.name = name, c.draw = draw;
    c.problem = {.seq_q = 96, .seq_kv = 200, .heads_q = 2, .heads_kv = 1, .head_dim = head_dim};
    if (scale != 0) c.problem.scale = scale;
    cases.push_back(c);
  };
  add("normal_64", 64, Draw::normal);
  add("unscaled_128", 128, Draw::normal, 1);  // logits of about 11, up to 40
  add("large_64", 64, Draw::large);
  add("growing_128", 128, Draw::growing);
  add("repaired_64", 64, Draw::normal, 6);  // logits of about 50, lse of about 100
  cases.back().problem.causal = true, cases.back().nan_value = 190;
  return cases;
}

inline double root_mean_square_error(const std::vector<double>& got, const std::vector<double>& want) {
  double sum = 0;
  for (std::size_t x = 0; x < want.size(); ++x) {
    if (std::isfinite(want[x])) sum += (got[x] - want[x]) * (got[x] - want[x]);
  }
  return std::sqrt(sum / static_cast<double>(want.size()));
}

inline Target tf32_target(DeviceKind kind, const char* kernel, Pass pass) {
  return {.device = {.kind = kind, .emulated_arch = 80}, .kernel = kernel, .pass = pass};
}

/// The numbers rounded to 11 significant bits, as tf32 and float16 have them.
inline Inputs rounded_to_11_bits(Inputs inputs) {
  for (std::vector<double>* values : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
    for (double& x : *values) x = round_to(Dtype::float16, x);
  }
  return inputs;
}

/// Three products are as exact as the kernel in fp32, whose sums are short.
/// `values`: what v is multiplied by. From 2^-112 down numbers have fewer bits.
inline void expect_fast_errors(Case c, DeviceKind kind, Pass pass, const char* exact_kernel, const char* tensor_kernel,
                               const std::vector<std::vector<double> Results::*>& parts, double values = 1) {
  Expected expected;
  expected.inputs = draw_inputs(c);
  for (double& x : expected.inputs.v) x *= values;
  expected.want = oracle(c, expected.inputs, is_backward(pass));
  c.problem.precision = Precision::ieee;
  const Outcome exact = attempt(c, tf32_target(kind, exact_kernel, pass), expected);
  c.problem.precision = Precision::automatic;
  const Outcome fast = attempt(c, tf32_target(kind, tensor_kernel, pass), expected);
  EXPECT_NE(first_changed(exact.results, fast.results), "") << "not the same products";
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const double of_exact = root_mean_square_error(exact.results.*parts[n], expected.want.*parts[n]);
    const double of_fast = root_mean_square_error(fast.results.*parts[n], expected.want.*parts[n]);
    EXPECT_LE(of_fast, 1.25 * of_exact) << c.name << ", part " << n;
    ::testing::Test::RecordProperty(c.name + "_" + std::to_string(n), std::to_string(of_fast / of_exact));
  }
}

/// One product is that of numbers with 11 bits: of inputs that have no more, each part has at most twice the error of plain
/// attention in float16. Three products of them have far less.
inline void expect_tf32_errors(Case c, DeviceKind kind, Pass pass, const char* kernel,
                               const std::vector<std::vector<double> Results::*>& parts) {
  Expected expected;
  expected.inputs = rounded_to_11_bits(draw_inputs(c));
  expected.want = oracle(c, expected.inputs, is_backward(pass));
  expected.plain = oracle(c, expected.inputs, is_backward(pass), Dtype::float16);
  const auto run = [&](Precision precision) {
    c.problem.precision = precision;
    return attempt(c, tf32_target(kind, kernel, pass), expected).results;
  };
  const Results one = run(Precision::tf32), three = run(Precision::fast);
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const auto error = [&](const Results& of) { return root_mean_square_error(of.*parts[n], expected.want.*parts[n]); };
    EXPECT_LE(error(one), 2 * error(expected.plain)) << c.name << ", part " << n;
    if (c.nan_value >= 0 || c.draw == Draw::growing) continue;  // rows of fp32; rows of one key, whose weight is 1
    EXPECT_GE(error(one), 10 * error(three)) << c.name << ", part " << n;
  }
}

/// A problem with numbers whose parts are not finite; `change` puts them into its inputs.
struct ExtremeCase {
  Case c;
  void (*change)(const Shape& shape, Inputs& inputs);
  bool backward;  // has gradients that all formulas agree about
};

inline std::vector<ExtremeCase> extreme_cases() {
  Case base;
  base.problem = {.seq_q = 40, .seq_kv = 70, .heads_q = 2, .heads_kv = 1, .head_dim = 32, .precision = Precision::fast};
  std::vector<ExtremeCase> cases;
  const auto add = [&](const char* name, bool backward, void (*change)(const Shape&, Inputs&)) {
    cases.push_back({base, change, backward});
    cases.back().c.name = name;
  };
  // A key whose scores are all -inf.
  add("infinite_key", false, [](const Shape& shape, Inputs& in) {
    for (std::int64_t row = 0; row < shape.rows_q * shape.heads_q; ++row) in.q[row * shape.dim + 3] = -0.5;
    in.k[5 * shape.dim + 3] = std::numeric_limits<double>::infinity();
  });
  add("infinite_value", false,
      [](const Shape& shape, Inputs& in) { in.v[7 * shape.dim_v + 4] = -std::numeric_limits<double>::infinity(); });
  // A number that is rounded up to Inf, in a product of about 3.
  add("largest_query", true, [](const Shape& shape, Inputs& in) {
    for (std::int64_t j = 0; j < shape.rows_kv; ++j) in.k[j * shape.dim + 2] = round_to(Dtype::float32, 1e-38 * (j % 3));
    in.q[9 * shape.heads_q * shape.dim + 2] = std::numeric_limits<float>::max();
  });
  return cases;
}

inline void expect_same_numbers(const ExtremeCase& extreme, DeviceKind kind, Pass pass, const char* kernel) {
  const bool backward = is_backward(pass);
  if (backward && !extreme.backward) return;
  Expected expected;
  expected.inputs = draw_inputs(extreme.c);
  extreme.change(Shape(extreme.c), expected.inputs);
  expected.want = oracle(extreme.c, expected.inputs, backward);
  expected.plain = oracle(extreme.c, expected.inputs, backward, Dtype::float32);
  const Outcome outcome = attempt(extreme.c, tf32_target(kind, kernel, pass), expected);
  for (const std::string& line : differences(extreme.c, pass, outcome, expected)) ADD_FAILURE() << line;
}

}  // namespace flash_attention::testing
