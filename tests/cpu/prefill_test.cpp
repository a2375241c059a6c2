#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "plan/families/cpu_tiles.h"
#include "plan/kernel_table.h"
#include "support/cases/contract.h"

// What the small problems of the contract do not reach: blocks of rows that go over the keys together, and copied keys.

namespace flash_attention::testing {
namespace {

/// K and V of a head are 266 KB as float.
Case far_keys(const char* name, Dtype dtype) {
  Case c;
  c.name = name;
  c.problem = {.seq_kv = 137, .head_dim = 256, .dtype = dtype};
  return c;
}

/// Each thread has many blocks of rows; neither the last pair of a head nor the last four are whole.
Case with_rows_for(const DeviceInfo& device, Case c) {
  c.problem.seq_q = 6 * plan::cpu_block_q(device.isa) + 5;
  c.problem.heads_q = c.problem.heads_kv = (16 * device.threads + 6) / 7 + 1;
  return c;
}

std::vector<Case> far_keys_cases() {
  Case causal = far_keys("causal", Dtype::float16);  // converted once for both blocks
  causal.problem.causal = true;
  Case window = far_keys("window", Dtype::float32);  // the second block of a pair begins later than the first
  window.problem.window_left = 20;
  window.problem.window_right = 0;
  Case mask = far_keys("mask", Dtype::float32);
  mask.problem.mask = {.present = true, .q_stride = mask.problem.seq_kv};
  mask.nan_value = 70;
  return {far_keys("full", Dtype::float32), causal, window, mask};
}

using FarKeys = ::testing::TestWithParam<Case>;

TEST_P(FarKeys, TwoBlocksGoTogetherInBackwardFour) {
  const DeviceInfo device = cpu::info();
  const Case c = with_rows_for(device, GetParam());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_EQ(make_plan(c.problem, pass, device).block_q, (pass == Pass::forward ? 2 : 4) * plan::cpu_block_q(device.isa));
    check(c, {.pass = pass});
  }
}

TEST_P(FarKeys, TheNextTileIsAskedForBetweenScores) {
  Case c = GetParam();
  c.problem.seq_q = 30;  // more than cpu/decode takes, and one block or two
  c.problem.heads_q = c.problem.heads_kv = 12;
  const std::int64_t bytes =
      c.problem.seq_kv * 12 * 2 * c.problem.head_dim * static_cast<std::int64_t>(size_of(c.problem.dtype));
  EXPECT_GT(bytes, plan::cpu_cache_resident_bytes(plan::cpu_tuned_core_cache));
  for (const Pass pass : {Pass::forward, Pass::backward}) check(c, {.pass = pass});
}

/// As many as decode would read side by side, with more rows than it ever takes.
TEST(ManyRows, OnLongKeys) {
  Case c;
  c.name = "many_rows";
  c.problem = {.seq_q = 130, .seq_kv = 520, .heads_q = 6, .heads_kv = 6, .head_dim = 64};
  EXPECT_GT(c.problem.seq_kv * 6 * 2 * 64 * 4, plan::cpu_cache_resident_bytes(plan::cpu_tuned_core_cache));
  for (const Pass pass : {Pass::forward, Pass::backward}) check(c, {.pass = pass});
}

INSTANTIATE_TEST_SUITE_P(All, FarKeys, ::testing::ValuesIn(far_keys_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
