#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using StandardBackward = ::testing::TestWithParam<Case>;

TEST_P(StandardBackward, Gpu) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "standard/backward", .pass = Pass::standard_backward});
}

TEST_P(StandardBackward, SameBits) {
  REQUIRE_GPU(70);
  check_reproducible(
      GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "standard/backward", .pass = Pass::standard_backward});
}

INSTANTIATE_TEST_SUITE_P(Float32, StandardBackward, ::testing::ValuesIn(contract_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, StandardBackward, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, StandardBackward, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
