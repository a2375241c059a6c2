#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

// forward/sm100 compiles without spills for sm_100a: its sizes, and the options that take most registers. The assembler of
// CUDA 13.0 makes other code for sm_103a, with 4 bytes spilled by a causal mask and 72 by all options at once.
namespace flash_attention::testing {
namespace {

Problem usual_sm100(std::int64_t head_dim, std::int64_t head_dim_v, bool causal) {
  return {.batch = 2,
          .seq_q = 1024,
          .seq_kv = 1024,
          .heads_q = 8,
          .heads_kv = 2,
          .head_dim = head_dim,
          .head_dim_v = head_dim_v,
          .dtype = Dtype::bfloat16,
          .causal = causal};
}

/// Every option that the kernel takes, but a soft cap, with which a bias makes no other code.
Problem every_sm100_option() {
  Problem p = usual_sm100(128, 128, false);
  p.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = 1024};
  p.mask = {.present = true, .q_stride = 1024};
  p.alibi = p.key_lengths = p.seqused_q = p.seqused_kv = p.sink = p.left_padding = true;
  p.window_left = 100, p.window_right = 3;
  return p;
}

std::vector<Problem> sm100_problems(int arch) {
  if (arch == 103 && !with_long_tail()) return {usual_sm100(128, 128, true)};
  std::vector<Problem> problems{usual_sm100(128, 128, false), usual_sm100(192, 128, true), every_sm100_option()};
  Problem few = usual_sm100(64, 64, true);
  few.seq_q = 100;
  problems.push_back(few);
  if (!with_long_tail()) return problems;
  for (const std::int64_t head_dim : {40, 64, 80, 96, 128}) {
    for (const bool causal : {false, true}) problems.push_back(usual_sm100(head_dim, head_dim, causal));
  }
  Problem packed = usual_sm100(128, 128, true), capped = packed, masked = packed;
  packed.packed = true, packed.total_q = packed.total_kv = 2000;
  capped.softcap = 30;
  masked.hidden_rows.bounds = 4, masked.hidden_rows.batch_stride = 4096, masked.hidden_rows.head_stride = 4096;
  problems.insert(problems.end(), {packed, capped, masked});
  return problems;
}

class Sm100Compile : public ::testing::TestWithParam<int> {};

TEST_P(Sm100Compile, Forward) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Plan> plans;
  for (const Problem& problem : sm100_problems(GetParam()))
    plans.push_back(make_plan(problem, Pass::forward, typical_gpu(GetParam()), "forward/sm100"));
  expect_plans_compile(plans, GetParam(), GetParam() == 103 ? 100 : 0);
}

INSTANTIATE_TEST_SUITE_P(, Sm100Compile, ::testing::Values(100, 103));

}  // namespace
}  // namespace flash_attention::testing
