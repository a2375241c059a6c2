// What `flash-attention tune` tries compiles: the planner refuses stages that a kernel has no room for.
#include <gtest/gtest.h>

#include "api/checks/validate.h"
#include "plan/tuned.h"
#include "support/compile.h"

namespace flash_attention::testing {
namespace {

void expect_stages_compile(const Problem& problem, Pass pass) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (plan::Alternative& one : plan::alternatives(api::normalise(problem, pass), pass, typical_gpu(90))) {
    if (one.choice.num_stages > 0 && one.choice.kernel.ends_with("/sm90")) plans.push_back(std::move(one.plan));
  }
  ASSERT_GT(plans.size(), 0u);
  constexpr int any_spill = 1 << 20;  // it would lose its contest
  expect_plans_compile(plans, 90, any_spill);
}

Problem sized(std::int64_t seq, std::int64_t head_dim) {
  return {.batch = 16,
          .seq_q = seq,
          .seq_kv = seq,
          .heads_q = 16,
          .heads_kv = 16,
          .head_dim = head_dim,
          .dtype = Dtype::bfloat16};
}

TEST(AlternativesCompile, StagesOfShortForward) { expect_stages_compile(sized(77, 64), Pass::forward); }

TEST(Alternatives, ThreeWarpgroupsHaveTheirStages) {
  const Problem problem = api::normalise(sized(4096, 64), Pass::backward);
  for (const plan::Alternative& one : plan::alternatives(problem, Pass::backward, typical_gpu(90)))
    EXPECT_TRUE(one.plan.block_kv != 192 || one.choice.num_stages == 0) << one.choice.num_stages;
}

}  // namespace
}  // namespace flash_attention::testing
