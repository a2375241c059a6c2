#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target tangent_sm80_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "tangent/sm80", .pass = Pass::tangent}; }

using TangentSm80 = ::testing::TestWithParam<Case>;

TEST_P(TangentSm80, Gpu) {
  REQUIRE_GPU(80);
  if (const std::string reason = rejection(GetParam(), tangent_sm80_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), tangent_sm80_on_gpu());
}

TEST_P(TangentSm80, SameBits) {
  REQUIRE_GPU(80);
  if (const std::string reason = rejection(GetParam(), tangent_sm80_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), tangent_sm80_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TangentSm80, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, TangentSm80, ::testing::ValuesIn(derivative_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentSm80, ::testing::Values(all_at_once(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
