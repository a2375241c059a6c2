// What the planner gives forward/tf32 and backward/tf32 compiles. Backward spills nothing; forward of wide heads keeps what
// one of its products does not need in memory meanwhile.
#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

void expect_tf32_compiles(Problem problem, Pass pass, int arch, int allowed_spill_bytes = 0) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  problem.precision = Precision::fast;
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
  const Plan plan = make_plan(problem, pass, device, pass == Pass::forward ? "forward/tf32" : "backward/tf32");
  expect_plans_compile({plan}, arch, allowed_spill_bytes);
}

Problem causal(std::int64_t head_dim, bool deterministic = false) {
  return {.seq_q = 1024,
          .seq_kv = 1024,
          .heads_q = 8,
          .heads_kv = 8,
          .head_dim = head_dim,
          .causal = true,
          .deterministic = deterministic};
}

Problem with_every_option() {
  Problem problem{.batch = 2, .seq_q = 256, .seq_kv = 256, .heads_q = 4, .heads_kv = 2, .head_dim = 128};
  problem.softcap = 30;
  problem.bias = {.present = true, .dtype = Dtype::float32, .q_stride = 256};
  problem.mask = {.present = true, .q_stride = 256};
  problem.alibi = problem.key_lengths = problem.seqused_q = problem.seqused_kv = problem.sink = true;
  problem.window_left = 100;
  problem.window_right = 3;
  problem.dropout_p = 0.1f;
  return problem;
}

TEST(Tf32Compile, Backward128Deterministic) { expect_tf32_compiles(causal(128, true), Pass::backward, 90); }
TEST(Tf32Compile, EveryOption) {
  expect_tf32_compiles(with_every_option(), Pass::forward, 80, 512);
  expect_tf32_compiles(with_every_option(), Pass::backward, 80);
}
TEST(Tf32Compile, LongTail) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  expect_tf32_compiles(causal(64), Pass::forward, 90);  // without a spill
  for (const int arch : {80, 90, 120}) {
    for (const std::int64_t head_dim : {64, 96, 128, 256}) expect_tf32_compiles(causal(head_dim), Pass::forward, arch, 512);
    for (const std::int64_t head_dim : {64, 96}) expect_tf32_compiles(causal(head_dim), Pass::backward, arch);
  }
}

}  // namespace
}  // namespace flash_attention::testing
