// Configurations that the planner gives forward/sm89_fp8 compile on each architecture that has it.
#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Problem of_codes(std::int64_t head_dim, bool causal = true) {
  Problem p{.batch = 2, .seq_q = 1024, .seq_kv = 1024, .heads_q = 8, .heads_kv = 2, .head_dim = head_dim};
  p.dtype = Dtype::bfloat16, p.causal = causal;
  p.q_dtype = p.kv_dtype = Dtype::float8_e4m3, p.q_scales = p.kv_scales = ScaleKind::head;
  return p;
}

/// All options that touch scores.
Problem everything_of_codes() {
  Problem p = of_codes(128);
  p.softcap = 30, p.dropout_p = 0.1f, p.window_left = 100, p.window_right = 3, p.causal = false;
  p.bias = {.present = true, .dtype = Dtype::bfloat16, .q_stride = 1024};
  p.mask = {.present = true, .q_stride = 1024};
  p.alibi = p.sink = p.seqused_q = p.seqused_kv = true;
  return p;
}

Problem in_pages_of_codes() {
  Problem p = of_codes(128);
  p.page_size = 16, p.num_pages = 256, p.seqused_kv = true;
  return p;
}

class ForwardSm89Fp8Compiles : public ::testing::TestWithParam<int> {};

/// On sm_89 one register is missing at 256 columns without a mask. On sm_120 the assembler keeps a few addresses in memory, which are read once for each block of keys, as those of
/// forward/sm80 (archs_compile_test.cpp). On sm_90 and sm_100 it makes 16 bits of the codes in registers, and stores up to 116 bytes of
/// what they displace: most with more than 128 columns.
TEST_P(ForwardSm89Fp8Compiles, WithoutSpills) {
  const int arch = GetParam();
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::vector<Problem> problems{of_codes(128, false)};
  if (arch == 89 || with_long_tail()) problems.insert(problems.end(), {of_codes(256), everything_of_codes()});
  if (with_long_tail()) {
    problems.insert(problems.end(), {of_codes(64), of_codes(64, false), of_codes(128), of_codes(192), of_codes(256, false),
                                     in_pages_of_codes()});
    problems.push_back(of_codes(128));
    problems.back().q_dtype = problems.back().kv_dtype = Dtype::float8_e5m2;
    problems.push_back(of_codes(128));
    problems.back().packed = true, problems.back().total_q = problems.back().total_kv = 2000, problems.back().window_left = 9;
    problems.push_back(of_codes(128));
    problems.back().seq_q = 64;
  }
  std::vector<Plan> plans;
  for (const Problem& problem : problems)
    plans.push_back(make_plan(problem, Pass::forward, typical_gpu(arch), "forward/sm89_fp8"));
  expect_plans_compile(plans, arch, arch == 90 || arch == 100 ? 120 : arch == 120 ? 20 : 4);
}

INSTANTIATE_TEST_SUITE_P(, ForwardSm89Fp8Compiles, ::testing::Values(89, 90, 100, 120),
                         [](const ::testing::TestParamInfo<int>& arch) { return "sm_" + std::to_string(arch.param); });

}  // namespace
}  // namespace flash_attention::testing
