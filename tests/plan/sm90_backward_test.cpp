// How backward/sm90 divides the heads of a group between tasks, and where these add to sums in memory in order.
#include <gtest/gtest.h>

#include <algorithm>

#include "flash_attention/attention.h"
#include "plan/kernel_config.h"

namespace flash_attention::testing {
namespace {

DeviceInfo hopper(int num_sms) {
  return {
      .device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = num_sms, .shared_bytes = 232448, .l2_bytes = 50 << 20};
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

bool has_launch(const Plan& plan, const std::string& entry) {
  return std::ranges::any_of(plan.launches, [&](const Launch& launch) { return launch.entry == entry; });
}
bool sums_queries(const Plan& plan) {
  return has_launch(plan, "backward_sm90_convert") || has_launch(plan, "backward_sm90_finish");
}
bool sums_keys(const Plan& plan) { return has_launch(plan, "backward_sm90_convert_keys"); }

TEST(Sm90Backward, DividesAGroupWhereTasksAreFew) {
  for (const std::int64_t head_dim : {72, 96, 128}) {
    const Plan causal = plan_of(grouped(1, head_dim, true));  // 128 tiles of keys
    EXPECT_EQ(causal.num_splits, 16);
    EXPECT_TRUE(sums_keys(causal));
    EXPECT_EQ(plan_of(grouped(1, head_dim, false)).num_splits, 1);
    Problem half = grouped(1, head_dim, false);
    half.batch = 1;
    EXPECT_EQ(plan_of(half).num_splits, 2);
  }
  const Plan three_warpgroups = plan_of(grouped(1, 64, true));  // 86 tiles of keys
  EXPECT_EQ(three_warpgroups.num_splits, 32);
  EXPECT_TRUE(sums_keys(three_warpgroups));
}

TEST(Sm90Backward, KeepsAGroupTogetherWhereTasksAreMany) {
  for (const std::int64_t heads_kv : {8, 32}) {
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(grouped(heads_kv, 128, causal));
      EXPECT_EQ(plan.num_splits, 1);
      EXPECT_FALSE(sums_keys(plan));
    }
  }
}

TEST(Sm90Backward, GivesATaskTwoHeadsOfALargeGroup) {
  Problem p = grouped(4, 128, true);  // groups of eight
  EXPECT_EQ(plan_of(p).num_splits, 4);
  EXPECT_TRUE(sums_keys(plan_of(p)));
  for (void (*const change)(Problem&) : {+[](Problem& q) { q.seq_q = q.seq_kv = 1024; },
                                         +[](Problem& q) { q.causal = false; }, +[](Problem& q) { q.deterministic = true; },
                                         +[](Problem& q) { q.head_dim = 64; }, +[](Problem& q) { q.softcap = 20; }}) {
    Problem other = p;
    other.batch = 16;
    change(other);
    EXPECT_EQ(plan_of(other).num_splits, 1);
  }
}

TEST(Sm90Backward, TakesHeadsInTurnWhereQueriesAreFew) {
  const auto in_turn = [](const Problem& p) {
    for (const Launch& launch : plan_of(p).launches) {
      const auto* config = plan::config_of<abi::BackwardConfig>(launch);
      if (config != nullptr && config->interleave_heads) return true;
    }
    return false;
  };
  for (const std::int64_t head_dim : {64, 128}) {
    Problem p = grouped(32, head_dim, false);
    EXPECT_FALSE(in_turn(p));
    p.seq_q = 256;
    EXPECT_TRUE(in_turn(p));
    p.batch = 16;  // too many rows for L2
    EXPECT_FALSE(in_turn(p));
    p.batch = 2, p.causal = true;
    EXPECT_FALSE(in_turn(p));
  }
}

/// dQ of heads that are complete long before the end, if tasks take one head after another.
TEST(Sm90Backward, ConvertsEarlyHeadsBesideLaterOnes) {
  const auto early = [](const Problem& p, int num_sms = 132) {
    const Plan plan = plan_of(p, num_sms);
    for (const Launch& launch : plan.launches) {
      const auto* config = plan::config_of<abi::BackwardConfig>(launch);
      if (config == nullptr) continue;
      EXPECT_EQ(config->early_dq, plan.early_heads > 0) << launch.entry;
    }
    return plan.early_heads;
  };
  Problem p = grouped(32, 64, true);
  EXPECT_EQ(early(p), 56) << "of 64 heads the last 8, about 65536 rows, are converted by a launch";
  p.seq_q = p.seq_kv = 16384;
  EXPECT_EQ(early(p), 0);
  p.head_dim = p.head_dim_v = 128;
  EXPECT_EQ(early(p), 60);
  p.batch = 1, p.heads_q = p.heads_kv = 7;
  EXPECT_EQ(early(p), 0) << "the last heads are more than half";
  for (void (*const change)(Problem&) : {+[](Problem& q) { q.softcap = 20; }, +[](Problem& q) { q.deterministic = true; },
                                         +[](Problem& q) { q.heads_kv = 8; }, +[](Problem& q) { q.window_left = 100; },
                                         +[](Problem& q) { q.head_dim = 256; }, +[](Problem& q) { q.causal = false; },
                                         +[](Problem& q) { q.seq_q = q.seq_kv = 2048; }}) {
    Problem other = grouped(32, 128, true);
    EXPECT_EQ(early(other), 56);
    change(other);
    EXPECT_EQ(early(other), 0);
  }
  // the problems of the emulated tests, on two SMs
  Problem small{.batch = 1, .seq_q = 120, .seq_kv = 300, .heads_q = 19, .heads_kv = 19, .head_dim = 64};
  small.causal = true, small.dtype = Dtype::bfloat16;
  EXPECT_EQ(early(small, 2), 10);
  small.seq_q = 150, small.seq_kv = 290, small.heads_q = small.heads_kv = 15, small.head_dim = 96;
  EXPECT_EQ(early(small, 2), 8);
}

/// Where scores are plain and 16 bits have room for what makes a row's probabilities 0.
TEST(Sm90Backward, SubtractsStatisticsByProducts) {
  const auto by_product = [](const Problem& p) {
    const Plan plan = plan_of(p);
    const auto* config = plan::config_of<abi::BackwardConfig>(plan.launches[1]);
    const bool result = config != nullptr && config->statistics_by_product;
    EXPECT_EQ(plan.workspace_offsets[static_cast<std::size_t>(abi::BackwardSm90Region::parts)] != 0, result);
    EXPECT_EQ(plan::config_of<abi::BackwardConfig>(plan.launches[0])->statistics_by_product, result) << "who writes them";
    return result;
  };
  for (const bool causal : {false, true}) {
    const Problem p = grouped(32, 128, causal);
    EXPECT_TRUE(by_product(p));
    for (void (*const change)(Problem&) :
         {+[](Problem& q) { q.softcap = 20; }, +[](Problem& q) { q.alibi = true; }, +[](Problem& q) { q.dropout_p = 0.1f; },
          +[](Problem& q) { q.head_dim = 256; }, +[](Problem& q) { q.scale = 0.0f; }, +[](Problem& q) { q.head_dim = 32; },
          +[](Problem& q) { q.window_left = 100; }, +[](Problem& q) { q.dtype = Dtype::float16, q.scale = 0.01f; }}) {
      Problem other = p;
      change(other);
      EXPECT_FALSE(by_product(other));
    }
    Problem other = p;
    other.scale = -0.01f;
    EXPECT_TRUE(by_product(other)) << "bfloat16";
    EXPECT_EQ(by_product(grouped(4, 128, causal)), !causal) << "a group is split: dK and dV are summed in memory";
  }
}

/// Masks often show the first keys to all queries.
TEST(Sm90Backward, SharesTheQueriesOfTheFirstKeysUnderMasks) {
  const auto tasks_share = [](const Problem& p) {
    const Plan plan = plan_of(p);
    const bool has_sums = plan.workspace_offsets[static_cast<std::size_t>(abi::BackwardSm90Region::dK)] != 0;
    for (const Launch& launch : plan.launches) {
      const auto* config = plan::config_of<abi::BackwardConfig>(launch);
      if (config != nullptr && config->split_first) return has_sums;
    }
    return false;
  };
  Problem p = grouped(32, 128, true);
  EXPECT_FALSE(tasks_share(p)) << "no mask";
  p.hidden_rows.bounds = 1;
  EXPECT_TRUE(tasks_share(p));
  Problem other = p;
  other.seq_q = other.seq_kv = 2048;
  EXPECT_FALSE(tasks_share(other)) << "no sums: one part";
  EXPECT_EQ(plan_of(p).launches.size(), plan_of(other).launches.size());
  other = p, other.deterministic = true;
  EXPECT_FALSE(tasks_share(other)) << "sums in any order";
  other = p, other.softcap = 5, other.bias = {.present = true};
  EXPECT_FALSE(tasks_share(other)) << "dQ apart";
  for (const std::int64_t head_dim : {64, 128}) {
    other = grouped(32, head_dim, false), other.mask = {.present = true, .q_stride = other.seq_kv};
    EXPECT_EQ(tasks_share(other), head_dim > 64) << "bytes at " << head_dim;
  }
}

/// Deterministic: five products in order, seven without.
TEST(Sm90Backward, AccumulatesInOrderWhereBitsMustNotChange) {
  for (const std::int64_t head_dim : {16, 64, 72, 128}) {
    for (const std::int64_t heads_kv : {1, 32}) {
      for (const bool causal : {false, true}) {
        Problem p = grouped(heads_kv, head_dim, causal);
        const Plan any = plan_of(p);
        p.deterministic = true;
        const Plan same = plan_of(p);
        EXPECT_FALSE(has_launch(same, "backward_sm90_separate_dq_kernel"));
        EXPECT_EQ(same.num_splits, any.num_splits);
        // A number for each 64 queries, and for each 16 keys of a split group; the rest is padding.
        const std::size_t numbers = 2 * 8192 * 32 / 64 + (any.num_splits > 1 ? 2 * 8192 / 16 : 0);
        EXPECT_GE(same.workspace_bytes, any.workspace_bytes + numbers * 4);
        EXPECT_LE(same.workspace_bytes, any.workspace_bytes + numbers * 4 + 2048);
      }
    }
  }
}

TEST(Sm90Backward, TakesNoTurnsWhereTasksWouldWait) {
  const auto is_ordered = [](Problem p) {
    p.deterministic = true;
    const Plan plan = plan_of(p);
    EXPECT_NE(sums_queries(plan), has_launch(plan, "backward_sm90_separate_dq_kernel"));
    return sums_queries(plan);
  };
  Problem few{.seq_q = 1024, .seq_kv = 1024, .heads_q = 16, .heads_kv = 16, .head_dim = 128, .dtype = Dtype::bfloat16};
  EXPECT_FALSE(is_ordered(few));
  few.causal = true;
  EXPECT_TRUE(is_ordered(few));
  few.seq_kv = 2048;  // half of the tiles of keys begin with the same queries
  EXPECT_FALSE(is_ordered(few));
  for (const std::int64_t head_dim : {64, 128}) {
    Problem softcap = grouped(32, head_dim, true);
    softcap.softcap = 20;
    EXPECT_TRUE(is_ordered(softcap));
    softcap.bias = {.present = true, .dtype = Dtype::float32, .q_stride = 1024};
    EXPECT_EQ(is_ordered(softcap), head_dim == 64);  // above, dQ has a kernel of its own in any case
  }
  EXPECT_FALSE(is_ordered(grouped(32, 256, true)));
  Problem packed = grouped(32, 128, true);
  packed.packed = true, packed.total_q = packed.total_kv = 10000;
  EXPECT_TRUE(is_ordered(packed));
  packed.causal = false;
  EXPECT_TRUE(is_ordered(packed));
  packed.total_q = 2000;
  EXPECT_FALSE(is_ordered(packed));
}

/// One tile of keys, of which every query sees something.
TEST(Sm90Backward, TakesOneLaunchForShortSequences) {
  const auto launches = [](const Problem& p) { return plan_of(p).launches.size(); };
  Problem p{.seq_q = 128, .seq_kv = 128, .heads_q = 4, .heads_kv = 4, .head_dim = 128, .dtype = Dtype::bfloat16};
  EXPECT_EQ(launches(p), 1);
  p.causal = true;
  EXPECT_EQ(launches(p), 1);
  p.deterministic = true;
  EXPECT_EQ(launches(p), 1);
  p.seq_q = 129;  // the first query sees no key: its dQ must be zeroed
  EXPECT_GT(launches(p), 1);
  p.causal = false, p.seq_q = 512;
  EXPECT_EQ(launches(p), 1);
  p.seq_q = 513;
  EXPECT_GT(launches(p), 1);
  p.seq_q = 128, p.seq_kv = 129;
  EXPECT_GT(launches(p), 1);
  p.seq_kv = 128, p.key_lengths = true;
  EXPECT_GT(launches(p), 1);
}

TEST(Sm90Backward, BeginsNoFirstLaunchEarly) {
  for (const std::int64_t head_dim : {64, 128, 256, 512}) {
    for (const std::int64_t seq : {100, 1000}) {
      Problem p = grouped(8, head_dim, true);
      p.seq_q = p.seq_kv = seq;
      const Plan plan = plan_of(p);
      EXPECT_FALSE(plan.launches.front().programmatic_launch);
      EXPECT_TRUE(plan.launches.size() == 1 || head_dim > 128 || plan.launches[1].programmatic_launch);
    }
  }
}

TEST(Sm90Backward, KeepsTheDivisionOfMemoryWhereLaunchesAreShort) {
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Problem p = grouped(8, head_dim, true);
    for (const Launch& launch : plan_of(p).launches) {  // 134 MB and more
      EXPECT_FALSE(launch.prefer_shared_carveout) << launch.entry;
    }
    p.batch = 1, p.seq_q = p.seq_kv = 197;
    for (const Launch& launch : plan_of(p).launches) EXPECT_TRUE(launch.prefer_shared_carveout) << launch.entry;
  }
}

/// Three have more keys to a task, two have shorter ones.
TEST(Sm90Backward, TakesTwoWarpgroupsWhereTasksAreFew) {
  const auto keys = [](std::int64_t batch, std::int64_t seq) {
    Problem p = grouped(16, 64, true);
    p.batch = batch, p.seq_q = p.seq_kv = seq, p.heads_q = 16;
    return plan_of(p).block_kv;
  };
  EXPECT_EQ(keys(1, 1024), 128);
  EXPECT_EQ(keys(1, 2048), 128);
  EXPECT_EQ(keys(2, 2048), 192);
}

bool is_ordered(const Plan& plan) {
  return std::ranges::any_of(plan.launches, [](const Launch& launch) {
    return launch.entry == "backward_sm90_prepare" &&
           plan::config_of<abi::BackwardConfig>(launch)->dq_mode == abi::DqMode::ordered;
  });
}

/// Sums that need not be zeroed.
TEST(Sm90Backward, AccumulatesInOrderUnaskedInManyShortLoops) {
  const auto turns = [](std::int64_t batch, std::int64_t seq, std::int64_t heads_kv, bool causal) {
    Problem p = grouped(heads_kv, 128, causal);
    p.batch = batch, p.seq_q = p.seq_kv = seq;
    return is_ordered(plan_of(p));
  };
  EXPECT_TRUE(turns(32, 512, 32, true));
  EXPECT_TRUE(turns(32, 512, 32, false));
  EXPECT_FALSE(turns(1, 512, 32, true));  // few tasks
  EXPECT_FALSE(turns(32, 512, 8, true));
  EXPECT_TRUE(turns(16, 1024, 32, true));
  EXPECT_FALSE(turns(16, 1024, 32, false));
  EXPECT_TRUE(turns(8, 2048, 32, true));
  EXPECT_FALSE(turns(4, 2048, 32, true));  // 1024 tasks of 2048 keys on 132 SMs
  EXPECT_FALSE(turns(2, 8192, 32, true));
  Problem window = grouped(32, 128, true);
  window.window_left = 1023;
  EXPECT_TRUE(is_ordered(plan_of(window)));
  window.window_left = 5000;
  EXPECT_FALSE(is_ordered(plan_of(window)));
  Problem packed = grouped(32, 128, true);
  packed.packed = true, packed.batch = 16, packed.seq_q = packed.seq_kv = 4096, packed.total_q = packed.total_kv = 32768;
  EXPECT_TRUE(is_ordered(plan_of(packed)));
}

/// The cases of BackwardSm90Turns in tests/kernels/backward/sm90_emulated_test.cpp, on the two SMs it has.
TEST(Sm90Backward, TheEmulatedCasesTakeTurns) {
  const auto parts = [](Problem p) {
    p.dtype = Dtype::bfloat16, p.deterministic = true;
    const Plan plan = plan_of(p, 2);
    EXPECT_TRUE(sums_queries(plan));
    return plan.num_splits;
  };
  EXPECT_EQ(parts({.seq_q = 400, .seq_kv = 390, .heads_q = 3, .heads_kv = 3, .head_dim = 128}), 1);
  EXPECT_EQ(parts({.seq_q = 150, .seq_kv = 600, .heads_q = 7, .heads_kv = 7, .head_dim = 128, .causal = true}), 1);
  EXPECT_EQ(parts({.seq_q = 700, .seq_kv = 700, .heads_q = 2, .heads_kv = 2, .head_dim = 40, .window_left = 130}), 1);
  EXPECT_EQ(parts({.seq_q = 300, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64, .causal = true}), 6);
  EXPECT_EQ(
      parts({.seq_q = 210, .seq_kv = 200, .heads_q = 6, .heads_kv = 1, .head_dim = 96, .head_dim_v = 80, .causal = true}),
      6);
  EXPECT_EQ(parts({.seq_q = 300, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 128, .causal = true}), 6);
}

/// What docs/kernels/backward_sm90.md says of the workspace: besides two floats and head_dim of them a row and head,
/// head_dim + head_dim_v a key and key head, and a tile of keys more for each sequence.
TEST(Sm90Backward, SumsOfKeysTakeABoundedWorkspace) {
  Problem p = grouped(1, 128, true);
  p.seq_q = p.seq_kv = 1024, p.scale = 0;  // no statistics by products, whose room depends on splits
  const Plan one = plan_of(p, 1), many = plan_of(p, 100000);
  EXPECT_EQ(one.num_splits, 1);
  EXPECT_EQ(many.num_splits, 32);
  EXPECT_EQ(many.workspace_bytes - one.workspace_bytes, std::size_t{2} * (1024 + 128) * (128 + 128) * 4);
}

/// The cases of tests/kernels/backward/sm90_emulated_test.cpp that are named so, on the two SMs it has.
TEST(Sm90Backward, TheEmulatedCasesAreDivided) {
  const auto parts = [](Problem p) {
    p.dtype = Dtype::bfloat16;
    return plan_of(p, 2).num_splits;
  };
  EXPECT_EQ(parts({.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 64, .causal = true}), 6);
  EXPECT_EQ(parts({.seq_q = 200, .seq_kv = 300, .heads_q = 6, .heads_kv = 1, .head_dim = 128, .causal = true}), 6);
  EXPECT_EQ(parts({.seq_q = 150, .seq_kv = 450, .heads_q = 3, .heads_kv = 1, .head_dim = 40, .head_dim_v = 24}), 3);
  EXPECT_EQ(parts({.seq_q = 130, .seq_kv = 330, .heads_q = 3, .heads_kv = 1, .head_dim = 96, .head_dim_v = 80}), 3);
}

}  // namespace
}  // namespace flash_attention::testing
