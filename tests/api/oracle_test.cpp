// The oracle judges everything else, so its own gradients are checked against finite differences of its own forward pass.
#include "support/oracle/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/cases/contract.h"
#include "support/oracle/case_programs.h"

namespace flash_attention::testing {
namespace {

using OracleGradients = ::testing::TestWithParam<Case>;

double loss(const Case& c, const Inputs& in) {
  const Results r = oracle(c, in, false);
  double sum = 0;
  for (std::size_t x = 0; x < r.out.size(); ++x)
    if (std::isfinite(in.dout[x])) sum += r.out[x] * in.dout[x];
  for (std::size_t x = 0; x < in.dlse.size(); ++x)
    if (std::isfinite(r.lse[x])) sum += r.lse[x] * in.dlse[x];
  return sum;
}

TEST_P(OracleGradients, MatchFiniteDifferences) {
  const Case& c = GetParam();
  Inputs in = draw_inputs(c);
  const Results r = oracle(c, in, true);
  const auto probe = [&](const char* name, std::vector<double>& values, const std::vector<double>& gradient) {
    ASSERT_EQ(values.size(), gradient.size()) << name;
    for (std::size_t n = 0; n < 3 && !values.empty(); ++n) {
      const std::size_t x = (values.size() * (2 * n + 1) / 6);
      if (!std::isfinite(values[x])) {
        EXPECT_EQ(gradient[x], 0) << name;
        continue;
      }
      const double middle = values[x], step = 1e-4;
      values[x] = middle + step;
      const double above = loss(c, in);
      values[x] = middle - step;
      const double below = loss(c, in);
      values[x] = middle;
      EXPECT_NEAR(gradient[x], (above - below) / (2 * step), 1e-5 * (1 + std::fabs(gradient[x])))
          << name << "[" << x << "]";
    }
  };
  probe("dq", in.q, r.dq);
  probe("dk", in.k, r.dk);
  probe("dv", in.v, r.dv);
  if (c.dbias) probe("dbias", in.bias, r.dbias);
  if (c.dsink) probe("dsink", in.sink, r.dsink);
}

/// The cases with a NaN in a visible place have no finite loss to differentiate.
std::vector<Case> finite_cases() {
  std::vector<Case> cases = contract_cases(Dtype::float32);
  // Rows of the lowest biases have gradients 0 by definition: docs/numerics.md.
  std::erase_if(cases,
                [](const Case& c) { return c.nan_query >= 0 || c.nan_key >= 0 || c.nan_value >= 0 || c.lowest_bias; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Contract, OracleGradients, ::testing::ValuesIn(finite_cases()), case_name);

/// A row that sees one key has dS = dP - delta, two sums in float of the same terms: the exact gradient is 0, and what is
/// left are their rounding errors, whatever the order. The allowed error must have room for those.
TEST(Yardstick, HasRoomForTheRoundingOfSumsThatCancel) {
  for (const Pass pass : {Pass::backward, Pass::standard_backward}) {
    for (std::uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) {
      SCOPED_TRACE(seed);
      const Problem one_key{.seq_q = 2, .seq_kv = 1, .heads_q = 2, .heads_kv = 1, .head_dim = 48, .head_dim_v = 32};
      Case c;
      c.problem = one_key;
      c.seed = seed;
      check(c, {.pass = pass});
    }
  }
}

/// Backward is given an out that is rounded to the problem's type, which moves delta for everyone. With one key the
/// gradient is dlse's alone, and what the rounding has moved is the error of it: the errors of the sums must not make up
/// for that.
TEST(Yardstick, HasRoomForTheRoundingOfOut) {
  for (std::uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Case c;
    c.problem = {.seq_q = 1, .seq_kv = 1, .head_dim = 48, .head_dim_v = 64, .dtype = Dtype::bfloat16, .dropout_p = 0.15f};
    c.seed = c.dropout_seed = seed;
    c.dlse = true;
    check(c, {.pass = Pass::backward});
  }
}

/// The lse of one key is its score: what is left of a dot product and a bias that cancel.
TEST(Yardstick, HasRoomForScoresThatCancel) {
  for (std::uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Case c;
    c.problem = {.seq_q = 1, .seq_kv = 1, .head_dim = 320, .scale = 0.3f};
    c.problem.bias.present = true;
    c.seed = seed;
    check(c, {});
  }
}

/// A program's values are floats: the slope of tanh near 1 has few digits.
TEST(Yardstick, HasRoomForTheSlopeOfAProgram) {
  for (std::uint64_t seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Case c;
    c.problem = {.seq_q = 8, .seq_kv = 127, .head_dim = 248, .key_lengths = true};
    c.key_lengths = {106};  // scores from 30 on
    c.draw = Draw::falling;
    c.program = CaseProgram::squashed;
    c.seed = seed;
    describe_program(c);
    check(c, {.pass = Pass::backward});
  }
}

/// And not for more: a thousandth of a gradient is no rounding error.
TEST(Yardstick, IsCloseToTheExactGradient) {
  const Problem problem{.seq_q = 40, .seq_kv = 60, .heads_q = 2, .heads_kv = 1, .head_dim = 48, .head_dim_v = 32};
  Case c;
  c.problem = problem;
  const Inputs in = draw_inputs(c);
  const Results exact = oracle(c, in, true), plain = oracle(c, in, true, Dtype::float32);
  const auto close = [](const char* name, const std::vector<double>& got, const std::vector<double>& want) {
    double error = 0, largest = 0;
    for (std::size_t x = 0; x < want.size(); ++x) {
      error = std::max(error, std::fabs(got[x] - want[x]));
      largest = std::max(largest, std::fabs(want[x]));
    }
    EXPECT_LT(error, 4e-6 * largest) << name;
  };
  close("dq", plain.dq, exact.dq);
  close("dk", plain.dk, exact.dk);
  close("dv", plain.dv, exact.dv);
}

}  // namespace
}  // namespace flash_attention::testing
