#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using StandardForward = ::testing::TestWithParam<Case>;

TEST_P(StandardForward, Gpu) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "standard/forward", .pass = Pass::standard_forward});
}

TEST_P(StandardForward, SameBits) {
  REQUIRE_GPU(70);
  check_reproducible(GetParam(),
                     {.device = {.kind = DeviceKind::cuda}, .kernel = "standard/forward", .pass = Pass::standard_forward});
}

INSTANTIATE_TEST_SUITE_P(Float32, StandardForward, ::testing::ValuesIn(contract_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, StandardForward, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, StandardForward, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
