#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/detect.h"
#include "plan/kernel_table.h"
#include "support/cases/contract.h"

// What the small problems of the contract do not reach: key heads that are read together, because K and V of a sequence
// are more than a cache holds.

namespace flash_attention::testing {
namespace {

/// More than 1.5 MB of K and V.
Case long_keys(const char* name, Dtype dtype, std::int64_t seq_q) {
  const std::int64_t size = dtype == Dtype::float32 ? 4 : 2;
  Case c;
  c.name = name;
  c.problem = {.seq_q = seq_q, .heads_q = 10, .heads_kv = 5, .head_dim = 40, .dtype = dtype};
  c.problem.seq_kv = (3 << 19) / (5 * 80 * size) + 23;
  return c;
}

std::vector<Case> long_keys_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    Case window = long_keys("window", dtype, 3);
    window.problem.window_left = 700;
    window.problem.window_right = 0;
    Case mask = long_keys("mask", dtype, 4);
    mask.problem.mask = {.present = true, .q_stride = mask.problem.seq_kv};
    mask.nan_value = 70;
    Case wide = long_keys("wide", dtype, 1);
    wide.problem.head_dim = 64;
    const int rows = std::min(16, plan::cpu_block_q(cpu::chosen_isa()));  // eights of them
    cases.insert(cases.end(), {long_keys("full", dtype, 2), window, mask, wide, long_keys("eights", dtype, rows / 2)});
  }
  return cases;
}

int heads_together(const Problem& p) {
  return make_plan(p, Pass::forward, device_info({DeviceKind::cpu}), "cpu/decode").cpu.heads_together;
}

using LongKeys = ::testing::TestWithParam<Case>;

TEST_P(LongKeys, HeadsAreReadTogether) {
  EXPECT_EQ(heads_together(GetParam().problem), 5);
  check(GetParam(), {.kernel = "cpu/decode"});
}

/// Heads that are the same memory do not lie side by side: planner and kernel go by the plan alone.
TEST(SharedHeads, AreReadOneByOne) {
  for (const bool values : {false, true}) {
    Case c = long_keys(values ? "shared_values" : "shared_keys", Dtype::float32, 2);
    const std::int64_t dim = c.problem.head_dim;
    (values ? c.problem.v_strides : c.problem.k_strides) = {c.problem.seq_kv * dim, dim, 0};
    EXPECT_EQ(heads_together(c.problem), 1) << c.name;
    check(c, {.kernel = "cpu/decode"});
  }
}

INSTANTIATE_TEST_SUITE_P(All, LongKeys, ::testing::ValuesIn(long_keys_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
