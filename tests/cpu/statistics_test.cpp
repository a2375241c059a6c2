#include <cmath>
#include <vector>

#include "support/cases/contract.h"

// Statistics and their gradients on the best instruction set of this CPU; all keys of a call, and keys split over threads.

namespace flash_attention::testing {
namespace {

using CpuStatistics = ::testing::TestWithParam<Case>;

TEST_P(CpuStatistics, Forward) { check(GetParam(), {.pass = Pass::forward}); }
TEST_P(CpuStatistics, Backward) { check(GetParam(), {.pass = Pass::backward}); }

INSTANTIATE_TEST_SUITE_P(Float32, CpuStatistics, ::testing::ValuesIn(statistics_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, CpuStatistics, ::testing::ValuesIn(some_of(statistics_cases(Dtype::bfloat16), 5)),
                         case_name);

Case alone(bool Problem::* statistic) {
  Case c = statistics_cases(Dtype::float32)[0];
  Problem& p = c.problem;
  p.return_max_logit = p.return_key_mass = p.return_entropy = false;
  p.*statistic = true;
  return c;
}

TEST(CpuStatistics, EachAlone) {
  for (bool Problem::* statistic : {&Problem::return_max_logit, &Problem::return_key_mass, &Problem::return_entropy}) {
    check(alone(statistic), {.pass = Pass::forward});
    check(alone(statistic), {.pass = Pass::backward});
  }
}

TEST(CpuStatistics, SameBits) {
  Case c = statistics_cases(Dtype::float32)[1];
  c.problem.deterministic = true;
  check_reproducible(c, {.pass = Pass::forward});
  check_reproducible(c, {.pass = Pass::backward});
}

/// Every key of a row has the same score: the entropy is log(keys), every mass queries / keys.
TEST(CpuStatistics, EqualScores) {
  constexpr int rows = 5, keys = 77, dim = 16;
  const std::vector<float> q(rows * dim, 3.0f), k(keys * dim, 0.25f), v(keys * dim, 1.0f);
  std::vector<float> out(rows * dim), lse(rows), entropy(rows), mass(keys);
  float largest = 0;
  const Problem problem{.seq_q = rows,
                        .seq_kv = keys,
                        .head_dim = dim,
                        .return_max_logit = true,
                        .return_key_mass = true,
                        .return_entropy = true};
  forward(problem, {.q = q.data(),
                    .k = k.data(),
                    .v = v.data(),
                    .out = out.data(),
                    .lse = lse.data(),
                    .max_logit = &largest,
                    .key_mass = mass.data(),
                    .entropy = entropy.data()});
  EXPECT_NEAR(largest, 3.0f, 1e-5);
  for (const float value : entropy) EXPECT_NEAR(value, std::log(77.0f), 1e-5);
  for (const float value : mass) EXPECT_NEAR(value, 5.0f / 77, 1e-6);
}

}  // namespace
}  // namespace flash_attention::testing
