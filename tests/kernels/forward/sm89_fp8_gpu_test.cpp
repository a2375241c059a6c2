// forward/sm89_fp8 on a GPU.
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardSm89Fp8 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm89Fp8, KeepsTheContract) {
  REQUIRE_GPU(89);
  Case c = GetParam();
  c.narrow_products = true;
  check(c, {{.kind = DeviceKind::cuda}, "forward/sm89_fp8", Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Half, ForwardSm89Fp8, ::testing::ValuesIn(narrow_query_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(BFloat, ForwardSm89Fp8, ::testing::ValuesIn(narrow_query_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
