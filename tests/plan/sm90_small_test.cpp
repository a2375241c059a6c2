// forward/sm90: the tiles of problems that are too small for all SMs.
#include <gtest/gtest.h>

#include "flash_attention/attention.h"
#include "plan/kernel_config.h"

namespace flash_attention::testing {
namespace {

struct Planned {
  Plan plan;
  abi::ForwardConfig config;
};

/// On 132 SMs.
Planned planned(std::int64_t batch, std::int64_t seq, std::int64_t heads, std::int64_t dim, bool causal) {
  Problem p{.batch = batch, .seq_q = seq, .seq_kv = seq, .heads_q = heads, .heads_kv = heads, .head_dim = dim};
  p.dtype = Dtype::bfloat16;
  p.causal = causal;
  Plan plan = make_plan(p, Pass::forward, typical_gpu(90), "forward/sm90");
  const auto* config = plan::config_of<abi::ForwardConfig>(plan.launches[0]);
  return {plan, *config};
}

void expect_tile(const Planned& found, int block_q, int block_kv, int stages) {
  EXPECT_EQ(found.config.block_q, block_q);
  EXPECT_EQ(found.config.block_kv, block_kv);
  EXPECT_EQ(found.config.num_stages, stages);
}

TEST(Sm90Small, EachWarpgroupHasAnSmWhereThereAreEnough) {
  const Planned causal = planned(1, 1024, 8, 64, true);
  expect_tile(causal, 64, 64, 6);
  EXPECT_FALSE(causal.config.pair_tiles);
  EXPECT_EQ(causal.plan.launches[0].grid[0], 128);
  expect_tile(planned(1, 512, 8, 128, false), 64, 64, 4);
}

TEST(Sm90Small, TwoWarpgroupsShareAnSmBeforeThreeDo) {
  for (const auto& [seq, heads] : {std::pair{577, 16}, std::pair{1024, 12}})
    expect_tile(planned(1, seq, heads, 64, false), 128, 64, 4);
  expect_tile(planned(1, 2048, 8, 64, false), 64, 128, 2);
  expect_tile(planned(1, 2048, 8, 128, false), 128, 64, 4);  // 128 tiles
  expect_tile(planned(8, 577, 16, 64, false), 128, 64, 4);  // 640 tiles in five rounds, of 192 rows it would be 512 in four
  expect_tile(planned(1, 2048, 12, 64, false), 192, 128, 2);  // 132 tiles
  expect_tile(planned(1, 4096, 8, 64, false), 128, 128, 4);   // 256 tiles in two rounds, of 192 rows it would be 176
  expect_tile(planned(4, 577, 16, 64, false), 192, 128, 2);
}

TEST(Sm90Small, ShortSequencesHaveSmallTiles) {
  expect_tile(planned(64, 77, 12, 64, true), 64, 64, 2);
  expect_tile(planned(16, 77, 16, 64, false), 128, 64, 4);
  expect_tile(planned(64, 77, 16, 64, false), 64, 64, 2);
  expect_tile(planned(4, 128, 32, 128, false), 64, 64, 2);
  expect_tile(planned(64, 128, 32, 128, false), 128, 64, 2);
}

TEST(Sm90Small, FewShortRowsAreForSm80) {
  const auto chosen = [](const Problem& p) {
    const Plan plan = make_plan(p, Pass::forward, typical_gpu(90));
    return plan.kernel + " " + std::to_string(plan.block_q) + " x " + std::to_string(plan.block_kv);
  };
  Problem p{.batch = 16, .seq_q = 77, .seq_kv = 77, .heads_q = 16, .heads_kv = 16, .head_dim = 64, .dtype = Dtype::bfloat16};
  EXPECT_EQ(chosen(p), "forward/sm80 32 x 64");
  p.causal = true;
  EXPECT_EQ(chosen(p), "forward/sm80 32 x 64");
  const auto differs = [&](auto change) {
    Problem other = p;
    change(other);
    return chosen(other).starts_with("forward/sm90");
  };
  EXPECT_TRUE(differs([](Problem& o) { o.batch = 64; }));
  EXPECT_TRUE(differs([](Problem& o) { o.head_dim = 128; }));
  EXPECT_TRUE(differs([](Problem& o) { o.seq_kv = 129; }));
  EXPECT_TRUE(differs([](Problem& o) { o.softcap = 3; }));
  EXPECT_TRUE(differs([](Problem& o) { o.key_lengths = true; }));
  EXPECT_TRUE(differs([](Problem& o) { o.invariant = true; }));
}

TEST(Sm90Small, PairsAreForTilesThatWait) {
  EXPECT_FALSE(planned(1, 1024, 16, 128, true).config.pair_tiles);  // 128 tiles
  EXPECT_TRUE(planned(1, 2048, 8, 64, true).config.pair_tiles);     // 256 tiles: neighbours are on one SM, and as long
  EXPECT_FALSE(planned(64, 77, 12, 64, true).config.pair_tiles);    // two of a head, the second short
  EXPECT_TRUE(planned(64, 128, 12, 64, true).config.pair_tiles);    // every other block would have all the long ones
  const Planned one_each = planned(1, 2048, 16, 64, true);
  expect_tile(one_each, 128, 128, 4);
  EXPECT_TRUE(one_each.config.pair_tiles);
  EXPECT_EQ(one_each.plan.launches[0].grid[0], 128);
  const Planned large = planned(8, 2048, 16, 64, true);
  expect_tile(large, 192, 128, 4);
  EXPECT_TRUE(large.config.dynamic_scheduler);
}

/// The plan of `queries` on `keys`, on 132 SMs.
Plan plan_cross(std::int64_t queries, std::int64_t keys, std::int64_t heads, std::int64_t dim,
                void (*change)(Problem&) = {}) {
  Problem p{.batch = 2, .seq_q = queries, .seq_kv = keys, .heads_q = heads, .heads_kv = heads, .head_dim = dim};
  p.dtype = Dtype::bfloat16;
  if (change != nullptr) change(p);
  return make_plan(p, Pass::forward, typical_gpu(90), "forward/sm90");
}

TEST(Sm90Small, KeysAreSplitWhereRowTilesAreFew) {
  for (const std::int64_t dim : {64, 128, 256}) {
    const Plan plan = plan_cross(256, 8192, 16, dim);  // 64 row tiles
    EXPECT_EQ(plan.num_splits, 2);
    ASSERT_EQ(plan.launches.size(), 2u);
    EXPECT_EQ(plan.launches[0].grid[0], 128);
    EXPECT_EQ(plan.launches[1].entry, "forward_sm90_merge");
    EXPECT_GE(plan.workspace_bytes, static_cast<std::size_t>(2 * 32 * 256 * (dim + 2) * 4));
  }
  EXPECT_EQ(plan_cross(256, 8192, 8, 128).num_splits, 4);
  EXPECT_EQ(plan_cross(256, 8192, 32, 128).num_splits, 1);  // 128 row tiles
  EXPECT_EQ(plan_cross(256, 1024, 16, 128).num_splits, 1);  // few keys
}

TEST(Sm90Small, KeysAreSplitWithoutOptionsAlone) {
  void (*const changes[])(Problem&) = {[](Problem& p) { p.softcap = 20; }, [](Problem& p) { p.sink = true; },
                                       [](Problem& p) { p.key_lengths = true; }, [](Problem& p) { p.window_left = 4000; },
                                       [](Problem& p) { p.dropout_p = 0.1f; }};
  for (const auto change : changes) EXPECT_EQ(plan_cross(256, 8192, 16, 128, change).num_splits, 1);
  EXPECT_EQ(plan_cross(256, 8192, 16, 128, [](Problem& p) { p.causal = true; }).num_splits, 2);  // a part of a prompt
}

}  // namespace
}  // namespace flash_attention::testing
