// forward/sm90 and backward/sm90 over lists of blocks of keys: with the heads of a group as rows of a tile, and with a tile
// for each head.
#include <algorithm>

#include "emulator/checks/paths.h"
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

KeyList lists_of_blocks(std::int64_t entries, std::int64_t block_q, std::int64_t block_kv, std::int64_t heads = 1,
                        bool counts = false) {
  return {.kind = KeyListKind::blocks,
          .entries = entries,
          .heads = heads,
          .block_q = block_q,
          .block_kv = block_kv,
          .counts = counts};
}

std::vector<Case> tiled_list_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, Dtype::bfloat16);
    Problem& p = c.problem;
    p.batch = 1, p.heads_q = 16, p.heads_kv = 1, p.seq_q = 37, p.seq_kv = 521;
    p.key_list = lists_of_blocks(5, 1, 64);
    change(c, p);
    cases.push_back(std::move(c));
  };
  add("group_of_16", [](Case&, Problem&) {});
  add("group_of_16_causal", [](Case& c, Problem& p) {
    p.seq_q = p.seq_kv = 331, p.causal = true, p.key_list.counts = true, c.dlse = true;
  });
  add("group_of_16_wide_blocks", [](Case&, Problem& p) {
    p.heads_q = 32, p.heads_kv = 2, p.head_dim = p.head_dim_v = 128, p.key_list = lists_of_blocks(6, 1, 128, 2), p.seq_kv = 911;
  });
  add("group_of_7", [](Case&, Problem& p) {
    p.batch = 2, p.heads_q = 14, p.heads_kv = 2, p.head_dim = 40, p.head_dim_v = 72, p.causal = true,
    p.key_list = lists_of_blocks(4, 1, 64, 2);
  });
  add("group_of_4_of_queries", [](Case&, Problem& p) {
    p.heads_q = 8, p.heads_kv = 2, p.seq_q = 67, p.key_list = lists_of_blocks(3, 5, 192, 2, true), p.softcap = 3;
  });
  add("group_of_2_queries_of_a_warpgroup", [](Case&, Problem& p) {
    p.heads_q = 2, p.seq_q = 131, p.key_list = lists_of_blocks(3, 32, 64);
  });
  add("group_of_1", [](Case& c, Problem& p) {
    p.heads_q = p.heads_kv = 3, p.seq_q = 131, p.key_list = lists_of_blocks(3, 1, 128, 3), p.head_dim_v = 32, c.dlse = true;
  });
  add("group_of_64", [](Case&, Problem& p) { p.heads_q = 64, p.seq_q = 5, p.seq_kv = 200, p.key_list.entries = 2; });
  add("group_window", [](Case&, Problem& p) { p.window_left = 150, p.window_right = 70, p.seq_q = 101; });
  add("group_chunk_sink", [](Case& c, Problem& p) {
    p.attention_chunk = 100, p.causal = true, p.sink = c.dsink = true, p.heads_q = 6, p.heads_kv = 2, p.seq_q = 101;
  });
  add("group_used", [](Case& c, Problem& p) {
    p.batch = 2, p.seqused_q = p.seqused_kv = p.causal = true, c.seqused_q = {30, 37}, c.seqused_kv = {521, 100};
  });
  add("group_key_lengths", [](Case& c, Problem& p) {
    p.batch = 2, p.key_lengths = true, c.key_lengths = {0, 301}, p.heads_q = 8, p.heads_kv = 2;
  });
  add("group_late_maximum", [](Case& c, Problem& p) { c.draw = Draw::growing, p.key_list.entries = 8; });
  add("group_spike", [](Case& c, Problem& p) { c.draw = Draw::spike, p.dtype = Dtype::float16; });
  add("group_large", [](Case& c, Problem& p) { c.draw = Draw::large, p.causal = true; });
  add("group_nan_key", [](Case& c, Problem&) { c.nan_key = 70; });
  add("group_nan_value", [](Case& c, Problem& p) { c.nan_value = 70, p.seq_q = 50; });
  add("group_nan_query", [](Case& c, Problem&) { c.nan_query = 31; });
  add("group_no_entry", [](Case&, Problem& p) { p.key_list.entries = 0; });
  add("group_more_entries_than_blocks", [](Case&, Problem& p) { p.key_list.entries = 70; });
  add("group_large_blocks", [](Case&, Problem& p) { p.key_list = lists_of_blocks(1, 3, 512); });
  add("many_blocks", [](Case&, Problem& p) {  // more than the words that a warp makes at a time
    p.heads_q = 2, p.seq_q = 33, p.seq_kv = 70001, p.head_dim = p.head_dim_v = 16, p.key_list.entries = 40;
  });
  add("blocks_of_64", [](Case& c, Problem& p) {
    p.heads_q = 4, p.heads_kv = 2, p.seq_q = 197, p.key_list = lists_of_blocks(4, 64, 64, 4), c.dlse = true;
  });
  add("blocks_of_64_wide", [](Case&, Problem& p) {
    p.heads_q = p.heads_kv = 2, p.seq_q = 197, p.head_dim = p.head_dim_v = 128, p.key_list = lists_of_blocks(4, 64, 64, 2, true);
  });
  add("blocks_of_64_by_128_causal", [](Case&, Problem& p) {
    p.heads_q = 4, p.heads_kv = 2, p.seq_q = 331, p.causal = true, p.key_list = lists_of_blocks(2, 64, 128, 2);
  });
  add("blocks_of_128", [](Case&, Problem& p) {
    p.heads_q = 2, p.heads_kv = 2, p.seq_q = 331, p.key_list = lists_of_blocks(2, 128, 128, 2), p.causal = true;
  });
  add("blocks_of_96", [](Case& c, Problem& p) {
    p.heads_q = 3, p.seq_q = 211, p.key_list = lists_of_blocks(3, 96, 64, 3), c.nan_value = 70;
  });
  add("blocks_of_1000", [](Case&, Problem& p) { p.heads_q = 2, p.seq_q = 131, p.key_list = lists_of_blocks(1, 1000, 64); });
  add("wide_heads", [](Case&, Problem& p) {
    p.heads_q = 8, p.heads_kv = 1, p.head_dim = p.head_dim_v = 256, p.seq_q = 21, p.key_list.entries = 4;
  });
  return cases;
}

using TiledLists = ::testing::TestWithParam<Case>;

TEST_P(TiledLists, ForwardSm90) {
  const DeviceInfo device = device_info({.kind = DeviceKind::emulator, .emulated_arch = 90});
  const Plan plan = make_plan(GetParam().problem, Pass::forward, device, "forward/sm90");
  ASSERT_EQ(plan.launches.front().unit, "mask/list_map");
  EXPECT_LT(plan.listed_blocks, 0);
  check_sm90(GetParam(), "forward/sm90", Pass::forward, 2);
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TiledLists, ::testing::ValuesIn(tiled_list_cases()), case_name);

/// What backward/sm90 takes of them, and NaN in dO.
std::vector<Case> tiled_gradient_cases() {
  std::vector<Case> cases = tiled_list_cases();
  std::erase_if(cases, [](const Case& c) { return c.problem.sink || c.problem.head_dim > 128; });
  for (const char* name : {"group_of_7", "blocks_of_64"}) {
    Case c = *std::ranges::find(cases, name, &Case::name);
    c.name += "_nan_dout", c.nan_dout = 20;
    cases.push_back(std::move(c));
  }
  return cases;
}

using TiledListGradients = ::testing::TestWithParam<Case>;

TEST_P(TiledListGradients, BackwardSm90) {
  const DeviceInfo device = device_info({.kind = DeviceKind::emulator, .emulated_arch = 90});
  const Plan plan = make_plan(GetParam().problem, Pass::backward, device, "backward/sm90");
  ASSERT_EQ(plan.launches.front().unit, "mask/list_map");
  check_sm90(GetParam(), "backward/sm90", Pass::backward, 2);
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TiledListGradients, ::testing::ValuesIn(tiled_gradient_cases()), case_name);

/// Bits of lists are read in both passes: the covering arrays of tests/fuzz have no lists for these kernels.
TEST(TiledListPaths, AreTaken) {
  const std::vector<Case> cases = tiled_list_cases();
  const Case& c = *std::ranges::find(cases, "group_of_7", &Case::name);
  check_sm90(c, "forward/sm90", Pass::forward, 2);
  check_sm90(c, "backward/sm90", Pass::backward, 2);
  emulator::set_num_sms(0);
  EXPECT_TRUE(emulator::paths_taken().contains("mask/list_map bits read by forward/sm90"));
  EXPECT_TRUE(emulator::paths_taken().contains("mask/list_map bits read by backward/sm90"));
}

/// What it leaves to others, and how rows of a tile are chosen.
TEST(TiledListsPlan, Chooses) {
  Problem p{.seq_q = 32768, .seq_kv = 32768, .heads_q = 64, .heads_kv = 4, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.causal = true, p.key_list = lists_of_blocks(16, 1, 128, 4);
  const auto plan_of = [](const Problem& problem) { return make_plan(problem, Pass::forward, typical_gpu(90)); };
  EXPECT_EQ(plan_of(p).kernel, "forward/sm90");
  EXPECT_EQ(plan_of(p).launches.front().unit, "mask/list_map");
  EXPECT_EQ(plan_of(p).block_q, 128);
  EXPECT_EQ(plan_of(p).block_kv, 128);
  EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(80)).kernel, "forward/sm80");
  Problem other = p;
  other.seq_q = 8;
  EXPECT_EQ(plan_of(other).launches.front().unit, "mask/listed_blocks");
  other = p, other.key_list.block_kv = 32;
  EXPECT_EQ(plan_of(other).kernel, "decode/sm80");
  other = p, other.dropout_p = 0.1f;
  EXPECT_EQ(plan_of(other).launches.front().unit, "mask/listed_blocks");
  other = p, other.key_list.block_q = other.key_list.block_kv = 64;
  EXPECT_EQ(plan_of(other).block_q, 64);
  const auto gradients_of = [](const Problem& problem) { return make_plan(problem, Pass::backward, typical_gpu(90)); };
  EXPECT_EQ(gradients_of(p).kernel, "backward/sm90");
  EXPECT_EQ(gradients_of(p).launches[1].entry, "mask_list_columns");
  other = p, other.deterministic = true;
  EXPECT_EQ(gradients_of(other).launches.front().unit, "mask/listed_blocks");
  other = p, other.sink = true;
  EXPECT_EQ(gradients_of(other).launches.front().unit, "mask/listed_blocks");
}

}  // namespace
}  // namespace flash_attention::testing
