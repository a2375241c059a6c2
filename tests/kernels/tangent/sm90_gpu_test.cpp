#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target tangent_sm90_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "tangent/sm90", .pass = Pass::tangent}; }

using TangentSm90 = ::testing::TestWithParam<Case>;

TEST_P(TangentSm90, Gpu) {
  REQUIRE_GPU(90);
  if (const std::string reason = rejection(GetParam(), tangent_sm90_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), tangent_sm90_on_gpu());
}

TEST_P(TangentSm90, SameBits) {
  REQUIRE_GPU(90);
  if (const std::string reason = rejection(GetParam(), tangent_sm90_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), tangent_sm90_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TangentSm90, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, TangentSm90, ::testing::ValuesIn(derivative_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentSm90, ::testing::Values(all_at_once(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
