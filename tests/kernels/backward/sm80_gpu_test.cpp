#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using BackwardSm80 = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm80, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/sm80", .pass = Pass::backward});
}

TEST_P(BackwardSm80, SameBits) {
  REQUIRE_GPU(80);
  Case c = GetParam();
  c.problem.deterministic = true;
  check(c, {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/sm80", .pass = Pass::backward});
  check_reproducible(c, {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/sm80", .pass = Pass::backward});
}

INSTANTIATE_TEST_SUITE_P(Masks, BackwardSm80, ::testing::ValuesIn(mask_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardSm80, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm80, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
