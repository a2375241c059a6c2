#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

/// The widest heads, in 16 bits, and every option of one call.
TEST(ListedCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = 80, .num_sms = 108, .shared_bytes = shared_limit(80)};
  Problem p{.batch = 2, .seq_q = 256, .seq_kv = 512, .heads_q = 16, .heads_kv = 1, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.key_list = {.kind = KeyListKind::keys, .entries = 200, .counts = true};
  p.softcap = 30, p.alibi = p.sink = p.causal = true, p.dropout_p = 0.1f;
  std::vector<Plan> plans;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    plans.push_back(make_plan(p, pass, device, pass == Pass::forward ? "forward/listed" : "backward/listed"));
  }
  p = {.batch = 1, .seq_q = 4096, .seq_kv = 4096, .heads_q = 4, .heads_kv = 4, .head_dim = 64, .dtype = Dtype::bfloat16};
  p.key_list = {.kind = KeyListKind::blocks, .entries = 8, .heads = 4, .block_q = 64, .block_kv = 64};
  Plan masked = make_plan(p, Pass::forward, device, "forward/sm80");
  masked.launches.resize(1);  // that of the mask
  plans.push_back(masked);
  expect_plans_compile(plans, 80);
}

}  // namespace
}  // namespace flash_attention::testing
