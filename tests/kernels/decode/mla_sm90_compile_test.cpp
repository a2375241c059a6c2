#include <gtest/gtest.h>

#include "support/compile.h"

namespace flash_attention::testing {
namespace {

Problem latent_decoding(std::int64_t heads, std::int64_t seq_q) {
  Problem problem{.batch = 128, .seq_q = seq_q, .seq_kv = 4096, .heads_q = heads, .heads_kv = 1, .head_dim = 576};
  problem.head_dim_v = 512, problem.dtype = Dtype::bfloat16, problem.latent = problem.seqused_kv = true;
  problem.page_size = 64, problem.num_pages = 100000, problem.causal = true;
  return problem;
}

TEST(DecodeMlaCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = shared_limit(90)};
  Problem options = latent_decoding(16, 4);
  options.dtype = Dtype::float16, options.softcap = 30, options.window_left = 100;
  options.alibi = options.left_padding = options.sink = true;
  std::vector<Plan> plans;
  for (const Problem& problem : {latent_decoding(16, 1), options}) {
    plans.push_back(make_plan(problem, Pass::forward, device, "decode/mla_sm90"));
  }
  expect_plans_compile(plans, 90);
}

}  // namespace
}  // namespace flash_attention::testing
