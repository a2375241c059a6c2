#include <gtest/gtest.h>

#include "plan/gpu_facts.h"
#include "support/compile.h"
#include "support/long_tail.h"

// What the planner chooses on each architecture compiles there: all of it in the long tail; else one kernel of each family
// on an architecture that no other test compiles for.
namespace flash_attention::testing {
namespace {

Problem usual(std::int64_t head_dim, Dtype dtype, bool causal) {
  return {.batch = 2,
          .seq_q = 1024,
          .seq_kv = 1024,
          .heads_q = 8,
          .heads_kv = 2,
          .head_dim = head_dim,
          .dtype = dtype,
          .causal = causal};
}

Problem decoding(std::int64_t head_dim, std::int64_t page_size) {
  Problem problem = usual(head_dim, Dtype::bfloat16, true);
  problem.seq_q = 1;
  problem.seqused_kv = true;
  problem.page_size = page_size;
  problem.num_pages = page_size == 0 ? 0 : 256;
  return problem;
}

Problem packed(Problem problem) {
  problem.packed = true;
  problem.total_q = problem.total_kv = 2000;
  return problem;
}

struct Call {
  Problem problem;
  Pass pass;
};

std::vector<Call> every_call() {
  std::vector<Call> calls;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
      for (const std::int64_t head_dim : {64, 128, 256}) {
        for (const bool causal : {false, true}) calls.push_back({usual(head_dim, dtype, causal), pass});
      }
    }
    for (const std::int64_t head_dim : {64, 128}) {
      calls.push_back({packed(usual(head_dim, Dtype::bfloat16, true)), pass});
      Problem exact = usual(head_dim, Dtype::bfloat16, true);
      exact.deterministic = true;
      calls.push_back({exact, pass});
    }
  }
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (const std::int64_t page_size : {0, 16}) calls.push_back({decoding(head_dim, page_size), Pass::forward});
  }
  return calls;
}

std::vector<Call> calls_for(int arch) {
  if (with_long_tail()) return every_call();
  switch (arch) {
    case 75:
      return {{usual(64, Dtype::float16, true), Pass::forward}};
    case 86:
      return {{usual(64, Dtype::bfloat16, true), Pass::backward}};
    case 100:
      return {{usual(128, Dtype::bfloat16, true), Pass::forward}};
    case 120:
      return {{decoding(64, 16), Pass::forward}};
    default:
      return {};
  }
}

class Archs : public ::testing::TestWithParam<int> {};

TEST_P(Archs, WhatIsChosenCompiles) {
  const int arch = GetParam();
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans, wide, newer;
  for (const auto& [problem, pass] : calls_for(arch)) {
    Plan plan = make_plan(problem, pass, typical_gpu(arch));
    // At 256 the key gradients of the portable kernel spill a few registers, which costs it nothing. From sm_100 on the
    // assembler keeps up to five addresses of some sm80 kernels in memory (14 of the 406 of `compile --common` on sm_100,
    // 10 of 386 on sm_120): stored before the main loop, read at most four times for each tile, beside 128 to 320 tensor
    // instructions, or after it. Smaller tiles would spill nothing and read shared memory more often.
    const bool may_spill = plan.kernel == "backward/portable" && problem.head_dim == 256;
    const bool addresses = (arch >= 100 && (plan.kernel == "forward/sm80" || plan.kernel == "backward/sm80")) ||
                           (arch == 103 && plan.kernel == "forward/sm100");  // tests/kernels/sm100_compile_test.cpp
    (may_spill ? wide : addresses ? newer : plans).push_back(std::move(plan));
  }
  expect_plans_compile(plans, arch);
  expect_plans_compile(wide, arch, 64);
  expect_plans_compile(newer, arch, 20);
}

std::vector<int> archs() {
  std::vector<int> all;
  for (const plan::GpuFacts& facts : plan::gpu_facts()) {
    if (!calls_for(facts.arch).empty()) all.push_back(facts.arch);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, Archs, ::testing::ValuesIn(archs()),
                         [](const ::testing::TestParamInfo<int>& arch) { return jit::arch_name(arch.param); });

}  // namespace
}  // namespace flash_attention::testing
