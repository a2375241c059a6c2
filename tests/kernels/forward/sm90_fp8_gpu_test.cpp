// forward/sm90_fp8 on a GPU.
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardSm90Fp8 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Fp8, KeepsTheContract) {
  REQUIRE_GPU(90);
  Case c = GetParam();
  c.narrow_products = true;
  check(c, {{.kind = DeviceKind::cuda}, "forward/sm90_fp8", Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Half, ForwardSm90Fp8, ::testing::ValuesIn(narrow_query_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(BFloat, ForwardSm90Fp8, ::testing::ValuesIn(narrow_query_cases(Dtype::bfloat16)), case_name);

/// More tiles than an H200 has SMs, so that blocks take several and slots are used again and again.
std::vector<Case> large_cases_in_8_bits() {
  std::vector<Case> cases;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Case c;
      c.name = "large_" + std::to_string(dim) + (causal ? "_causal" : "_full");
      c.problem = {.batch = 2,
                   .seq_q = 300,
                   .seq_kv = 700,
                   .heads_q = 40,
                   .heads_kv = 10,
                   .head_dim = dim,
                   .dtype = Dtype::bfloat16,
                   .causal = causal};
      c.problem.q_dtype = c.problem.kv_dtype = Dtype::float8_e4m3;
      c.problem.q_scales = c.problem.kv_scales = ScaleKind::head;
      cases.push_back(c);
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Large, ForwardSm90Fp8, ::testing::ValuesIn(large_cases_in_8_bits()), case_name);

}  // namespace
}  // namespace flash_attention::testing
