#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

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
  Problem codes = latent_decoding(16, 1);
  codes.kv_dtype = Dtype::float8_e4m3, codes.kv_scales = ScaleKind::head;
  const auto plan = [&](const Problem& problem) { return make_plan(problem, Pass::forward, device, "decode/mla_sm90"); };
  Problem values = latent_decoding(16, 1);  // the whole key is its value
  values.head_dim = 512;
  expect_plans_compile({plan(latent_decoding(16, 1))}, 90);
  if (with_long_tail()) expect_plans_compile({plan(values)}, 90);
  if (with_long_tail()) expect_plans_compile({plan(latent_decoding(128, 2))}, 90);
  if (with_long_tail()) expect_plans_compile({plan(options)}, 90, 96);
  expect_plans_compile({plan(codes)}, 90, 96);  // beside the products: Q, the end of an item, the loads
  Problem lists = latent_decoding(128, 2);
  lists.causal = false, lists.key_list = {.kind = KeyListKind::keys, .entries = 2048};
  expect_plans_compile({plan(lists)}, 90);
}

/// Latent keys on decode/sm80: tiles of four sizes of shared memory.
TEST(DecodeMlaCompile, OnOlderGpus) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int arch : {80, 90, 120}) {
    if (arch != 80 && !with_long_tail()) continue;
    const DeviceInfo device{
        .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
    Problem values = latent_decoding(128, 2);
    values.head_dim = 512;
    std::vector<Plan> plans{make_plan(latent_decoding(128, 1), Pass::forward, device, "decode/sm80")};
    if (with_long_tail()) plans.push_back(make_plan(values, Pass::forward, device, "decode/sm80"));
    Problem lists = latent_decoding(128, 2);
    lists.key_list = {.kind = KeyListKind::keys, .entries = 2048};
    plans.push_back(make_plan(lists, Pass::forward, device, "decode/sm80"));
    expect_plans_compile(plans, arch);
  }
}

}  // namespace
}  // namespace flash_attention::testing
