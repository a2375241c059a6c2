#include "kernels/wide_cases.h"
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardSm80 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm80, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/sm80", .pass = Pass::forward});
}

TEST_P(ForwardSm80, SameBits) {
  REQUIRE_GPU(80);
  check_reproducible(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/sm80", .pass = Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Wide, ForwardSm80, ::testing::ValuesIn(wide_heads_of_mma()), case_name);
INSTANTIATE_TEST_SUITE_P(Masks, ForwardSm80, ::testing::ValuesIn(mask_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardSm80, ::testing::ValuesIn(cache_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm80, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm80, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
