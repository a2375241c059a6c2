#include "kernels/ladder/rungs.h"
#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

using LadderCompile = ::testing::TestWithParam<plan::Rung>;

/// No rung spills on the architecture that it is written for, in its larger tile; in the long tail on either, in both.
TEST_P(LadderCompile, SpillsNothing) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const plan::Rung& rung = GetParam();
  for (const int arch : {80, 90}) {
    if (arch < rung.arch || (arch > rung.arch && !with_long_tail())) continue;
    const DeviceInfo device{
        .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
    std::vector<Plan> plans;
    for (const std::int64_t head_dim : {64, 128}) {
      if (head_dim == 64 && !with_long_tail()) continue;
      Problem problem{.batch = 1,
                      .seq_q = 1024,
                      .seq_kv = 1024,
                      .heads_q = 8,
                      .heads_kv = 8,
                      .head_dim = head_dim,
                      .dtype = Dtype::bfloat16,
                      .causal = head_dim == 128};
      if (rung.narrow) problem.q_dtype = problem.kv_dtype = Dtype::float8_e4m3;
      plans.push_back(make_plan(problem, rung.pass, device, rung.name));
    }
    expect_plans_compile(plans, arch);
  }
}

INSTANTIATE_TEST_SUITE_P(, LadderCompile, ::testing::ValuesIn(plan::rungs().begin(), plan::rungs().end()),
                         [](const ::testing::TestParamInfo<plan::Rung>& rung) {
                           return std::string(rung.param.name.substr(rung.param.name.find('/') + 1));
                         });

}  // namespace
}  // namespace flash_attention::testing
