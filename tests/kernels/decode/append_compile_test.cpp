#include <gtest/gtest.h>

#include "api/checks/append_problem.h"
#include "flash_attention/runtime.h"
#include "plan/append.h"
#include "support/append_check.h"
#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Plan plan_of(std::vector<Launch> launches) {
  Plan plan;
  plan.kernel = "decode/append";
  plan.launches = std::move(launches);
  return plan;
}

/// The wide rows that models have, and those of every kind of scale.
TEST(AppendCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  AppendProblem problem{.batch = 64, .seq_new = 1, .seq_q = 1, .heads_q = 32, .heads_kv = 8, .head_dim = 128};
  problem.head_dim_v = 128, problem.dtype = Dtype::bfloat16, problem.rotary_dim = 128, problem.rotary_stride = 64;
  for (Strides* s : {&problem.q_strides, &problem.q_out_strides, &problem.k_strides, &problem.v_strides,
                     &problem.k_cache_strides, &problem.v_cache_strides}) {
    *s = {4096, 1024, 128};
  }
  const std::pair<Dtype, ScaleKind> caches[] = {{Dtype::bfloat16, ScaleKind::none},
                                                {Dtype::float8_e4m3, ScaleKind::head},
                                                {Dtype::int8, ScaleKind::token},
                                                {Dtype::float8_e5m2, ScaleKind::token}};
  for (const auto& [dtype, scales] : caches) {
    problem.cache_dtype = dtype, problem.scales = scales, problem.rotary_interleaved = !problem.rotary_interleaved;
    problem.page_size = 16;
    for (const bool norms : {false, true}) {
      problem.q_norm = problem.k_norm = norms;
      plans.push_back(plan_of({plan::lay_out_append(problem)}));
    }
  }
  expect_plans_compile(plans, 80);
  if (with_long_tail()) expect_plans_compile(plans, 90);  // nothing in it depends on the architecture
}

TEST(AppendCompile, GradientsWithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const std::int64_t dim : {64, 128, 256, 512}) {
    AppendProblem problem{.batch = 2, .seq_new = 64, .seq_q = 64, .heads_q = 32, .heads_kv = 8, .head_dim = dim};
    problem.dtype = Dtype::bfloat16, problem.rotary_dim = dim == 256 ? 64 : dim, problem.rotary_positions = 64;
    problem.q_norm = problem.k_norm = problem.in_rows = true, problem.norm_dtype = Dtype::bfloat16;
    problem.rotary_interleaved = dim == 64;
    problem = api::normalise(problem);
    plans.push_back(plan_of({plan::lay_out_append(problem)}));
    plans.push_back(plan_of(plan::lay_out_append_gradients(problem, true)));
  }
  expect_plans_compile(plans, 80);
}

/// As `compile --common` asks: sizes alone are given.
TEST(AppendCompile, FromAProblem) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const AppendProblem problem{
      .batch = 8, .seq_new = 1, .heads_kv = 8, .head_dim = 64, .dtype = Dtype::float16, .capacity = 64};
  const std::vector<KernelReport> reports = compile(problem, 80);
  ASSERT_EQ(reports.size(), 1);
  EXPECT_EQ(reports[0].kernel.find("decode/append"), 0) << reports[0].kernel;
  EXPECT_EQ(reports[0].spill_bytes, 0);
}

}  // namespace
}  // namespace flash_attention::testing
