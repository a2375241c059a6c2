#include <gtest/gtest.h>

#include "support/compile.h"

namespace flash_attention::testing {
namespace {

TEST(BackwardMlaCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = shared_limit(90)};
  Problem problem{.seq_q = 4096, .seq_kv = 8192, .heads_q = 64, .heads_kv = 1, .head_dim = 576, .head_dim_v = 512};
  problem.dtype = Dtype::bfloat16, problem.key_list = {.kind = KeyListKind::keys, .entries = 2048};
  expect_plan_compiles(make_plan(problem, Pass::backward, device, "backward/mla_sm90"), 90);
}

}  // namespace
}  // namespace flash_attention::testing
