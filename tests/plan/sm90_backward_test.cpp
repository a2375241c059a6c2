// How backward/sm90 divides the heads of a group between tasks.
#include <gtest/gtest.h>

#include "flash_attention/attention.h"

namespace flash_attention::testing {
namespace {

DeviceInfo hopper(int num_sms) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = num_sms, .shared_bytes = 232448};
}

Problem grouped(std::int64_t heads_kv, std::int64_t head_dim, bool causal) {
  return {.batch = 2,
          .seq_q = 8192,
          .seq_kv = 8192,
          .heads_q = 32,
          .heads_kv = heads_kv,
          .head_dim = head_dim,
          .dtype = Dtype::bfloat16,
          .causal = causal};
}

Plan plan_of(const Problem& p, int num_sms = 132) { return make_plan(p, Pass::backward, hopper(num_sms), "backward/sm90"); }

bool sums_keys(const Plan& plan) {
  for (const Launch& launch : plan.launches) {
    if (launch.entry == "backward_sm90_convert_keys") return true;
  }
  return false;
}

TEST(Sm90Backward, DividesAGroupWhereTasksAreFew) {
  for (const std::int64_t head_dim : {72, 96, 128}) {
    const Plan causal = plan_of(grouped(1, head_dim, true));  // 128 tiles of keys
    EXPECT_EQ(causal.num_splits, 2);
    EXPECT_TRUE(sums_keys(causal));
    EXPECT_EQ(plan_of(grouped(1, head_dim, false)).num_splits, 1);
    Problem half = grouped(1, head_dim, false);
    half.batch = 1;
    EXPECT_EQ(plan_of(half).num_splits, 2);
  }
  const Plan three_warpgroups = plan_of(grouped(1, 64, true));  // 86 tiles of keys
  EXPECT_EQ(three_warpgroups.num_splits, 4);
  EXPECT_TRUE(sums_keys(three_warpgroups));
}

TEST(Sm90Backward, KeepsAGroupTogetherWhereTasksAreManyOrBitsMustNotChange) {
  for (const std::int64_t heads_kv : {8, 32}) {
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(grouped(heads_kv, 128, causal));
      EXPECT_EQ(plan.num_splits, 1);
      EXPECT_FALSE(sums_keys(plan));
    }
  }
  Problem p = grouped(1, 128, true);
  p.deterministic = true;
  EXPECT_EQ(plan_of(p).num_splits, 1);
}

/// What docs/kernels/backward_sm90.md says of the workspace: besides two floats and head_dim of them a row and head,
/// head_dim + head_dim_v a key and key head, and a tile of keys more for each sequence.
TEST(Sm90Backward, SumsOfKeysTakeABoundedWorkspace) {
  const Problem p = grouped(1, 128, true);
  const Plan one = plan_of(p, 1), many = plan_of(p, 100000);
  EXPECT_EQ(one.num_splits, 1);
  EXPECT_EQ(many.num_splits, 32);
  EXPECT_EQ(many.workspace_bytes - one.workspace_bytes, std::size_t{2} * (8192 + 128) * (128 + 128) * 4);
}

/// The cases of tests/kernels/backward/sm90_emulated_test.cpp that are named so, on the two SMs it has.
TEST(Sm90Backward, TheEmulatedCasesAreDivided) {
  const auto parts = [](Problem p) {
    p.dtype = Dtype::bfloat16;
    return plan_of(p, 2).num_splits;
  };
  EXPECT_EQ(parts({.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64, .causal = true}), 2);
  EXPECT_EQ(parts({.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 128, .causal = true}), 2);
  EXPECT_EQ(parts({.seq_q = 150, .seq_kv = 450, .heads_q = 3, .heads_kv = 1, .head_dim = 40, .head_dim_v = 24}), 3);
  EXPECT_EQ(parts({.seq_q = 130, .seq_kv = 330, .heads_q = 3, .heads_kv = 1, .head_dim = 96, .head_dim_v = 80}), 3);
}

}  // namespace
}  // namespace flash_attention::testing
