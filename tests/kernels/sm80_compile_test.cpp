#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

DeviceInfo device(int arch) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
}

/// The shapes that are run most: the head dimensions with the smallest and the largest tiles, causal (128 is the planner's
/// choice of tests/jit/kernels_compile_test.cpp); in the long tail the others, and full, too.
std::vector<Problem> common_problems(bool also_128 = false) {
  std::vector<Problem> problems;
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    const bool taken = head_dim == 64 || head_dim == 256 || (head_dim == 128 && also_128);
    for (const bool causal : {false, true}) {
      if ((!causal || !taken) && !with_long_tail()) continue;
      problems.push_back({.batch = 1,
                          .seq_q = 1024,
                          .seq_kv = 1024,
                          .heads_q = 8,
                          .heads_kv = 8,
                          .head_dim = head_dim,
                          .dtype = Dtype::bfloat16,
                          .causal = causal});
    }
  }
  return problems;
}

/// Every option at once.
Problem everything(Dtype dtype) {
  Problem problem{.batch = 2, .seq_q = 256, .seq_kv = 256, .heads_q = 4, .heads_kv = 2, .head_dim = 128, .dtype = dtype};
  problem.softcap = 30;
  problem.bias = {.present = true, .dtype = dtype, .q_stride = 256};
  problem.mask = {.present = true, .q_stride = 256};
  problem.alibi = problem.key_lengths = problem.seqused_q = problem.seqused_kv = problem.sink = true;
  problem.packed = true, problem.total_q = problem.total_kv = 500;
  problem.window_left = 100;
  problem.window_right = 3;
  problem.dropout_p = 0.1f;
  return problem;
}

void expect_compile(const std::vector<Problem>& problems, Pass pass, const char* kernel, int arch) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const Problem& problem : problems) plans.push_back(make_plan(problem, pass, device(arch), kernel));
  expect_plans_compile(plans, arch);
}

TEST(Sm80Compile, Forward) { expect_compile(common_problems(), Pass::forward, "forward/sm80", 80); }
TEST(Sm80Compile, ForwardOnSm90) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  expect_compile(common_problems(), Pass::forward, "forward/sm80", 90);
}
/// Two warps share the columns of a row.
TEST(Sm80Compile, ForwardOfWideHeads) {
  for (const int arch : {80, 120}) {
    if (arch != 80 && !with_long_tail()) continue;
    Problem problem = common_problems().front();
    problem.head_dim = problem.head_dim_v = 512;
    expect_compile({problem}, Pass::forward, "forward/sm80", arch);
  }
}
/// Tiles for 99 KB of shared memory, of which an SM has 100: no spills there either.
TEST(Sm80Compile, SmallSharedMemory) {
  for (const int arch : {89, 86, 120}) {
    if (arch != 89 && !with_long_tail()) continue;
    Problem problem = common_problems().front();
    problem.causal = true;
    for (const std::int64_t head_dim : {128, 256}) {
      problem.head_dim = head_dim;
      expect_compile({problem}, Pass::forward, "forward/sm80", arch);
    }
    problem.head_dim = 64;
    expect_compile({problem}, Pass::backward, "backward/sm80", arch);
  }
}
TEST(Sm80Compile, Backward) { expect_compile(common_problems(), Pass::backward, "backward/sm80", 80); }

/// S, S., O and A fill most registers.
TEST(Sm80Compile, Tangent) {
  std::vector<Problem> problems = common_problems(true);
  std::erase_if(problems, [](const Problem& problem) { return problem.head_dim > 128; });
  problems.push_back(everything(Dtype::float16));
  expect_compile(problems, Pass::tangent, "tangent/sm80", 80);
  if (with_long_tail()) expect_compile(problems, Pass::tangent, "tangent/sm80", 90);
  problems.back().mask.present = false;  // in wide heads not beside options of scores
  expect_compile(problems, Pass::tangent, "tangent/sm90", 90);
}
TEST(Sm80Compile, Second) {
  std::vector<Problem> problems = common_problems(true);
  std::erase_if(problems, [](const Problem& problem) { return problem.head_dim > 128; });
  problems.push_back(everything(Dtype::bfloat16));
  problems.back().dropout_p = 0;
  problems.back().bias.present = problems.back().sink = false;  // whose gradients are those of second/portable
  expect_compile(problems, Pass::second, "second/sm80", 80);
  if (with_long_tail()) expect_compile(problems, Pass::second, "second/sm80", 90);
  std::erase_if(problems, [](const Problem& problem) { return problem.softcap != 0 && problem.head_dim > 64; });
  Problem options = everything(Dtype::bfloat16);  // in the widest heads that take options of scores
  options.head_dim = options.head_dim_v = 64;
  options.dropout_p = 0, options.bias.present = options.sink = false;
  problems.push_back(options);
  expect_compile(problems, Pass::second, "second/sm90", 90);
}

/// Large tiles of dbias take nearly all registers. Only dbias is compiled.
TEST(Sm80Compile, BiasGradient) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int arch : {80, 90}) {
    std::vector<Plan> plans;
    for (Problem problem : common_problems(true)) {
      if ((arch == 90 || problem.head_dim == 256) && !with_long_tail()) continue;
      if (problem.head_dim == 256) problem.causal = false;
      const Dtype dtype = problem.head_dim == 64 ? Dtype::float32 : problem.dtype;
      problem.bias = {.present = true, .dtype = dtype, .head_stride = 1024 * 1024, .q_stride = 1024};
      Plan plan = make_plan(problem, Pass::backward, device(arch), "backward/sm80");
      std::erase_if(plan.launches, [](const Launch& launch) { return launch.unit != "backward/sm80_dbias"; });
      ASSERT_EQ(plan.launches.size(), 1u);
      EXPECT_EQ(plan.launches[0].block, 256);
      plans.push_back(std::move(plan));
    }
    expect_plans_compile(plans, arch);
  }
}

TEST(Sm80Compile, Everything) {
  Problem problem = everything(Dtype::float16);
  expect_compile({problem}, Pass::forward, "forward/sm80", 80);
  if (with_long_tail()) expect_compile({problem}, Pass::backward, "backward/sm80", 80);
  problem.deterministic = true;  // dQ in a kernel of its own
  expect_compile({problem}, Pass::backward, "backward/sm80", 80);
}

}  // namespace
}  // namespace flash_attention::testing
