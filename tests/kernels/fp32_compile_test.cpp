// What the planner gives forward/fp32 and backward/fp32 compiles, and spills little: sums take most of the registers.
#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

void expect_fp32_compiles(std::int64_t head_dim, Pass pass, int arch, int allowed_spill_bytes = 0) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const Problem problem{.seq_q = 1024,
                        .seq_kv = 1024,
                        .heads_q = 8,
                        .heads_kv = 8,
                        .head_dim = head_dim,
                        .causal = true,
                        .precision = Precision::ieee};
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
  const Plan plan = make_plan(problem, pass, device, pass == Pass::forward ? "forward/fp32" : "backward/fp32");
  expect_plans_compile({plan}, arch, allowed_spill_bytes);
}

TEST(Fp32Compile, Forward64) { expect_fp32_compiles(64, Pass::forward, 90); }
TEST(Fp32Compile, Backward64) { expect_fp32_compiles(64, Pass::backward, 90, 64); }
TEST(Fp32Compile, LongTail) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  for (const int arch : {80, 90, 120}) {
    for (const std::int64_t head_dim : {64, 96, 128}) expect_fp32_compiles(head_dim, Pass::forward, arch, 128);
    expect_fp32_compiles(64, Pass::backward, arch, 64);
    if (arch == 120) continue;  // less shared memory
    expect_fp32_compiles(256, Pass::forward, arch);
    expect_fp32_compiles(128, Pass::backward, arch, 64);
  }
}

}  // namespace
}  // namespace flash_attention::testing
