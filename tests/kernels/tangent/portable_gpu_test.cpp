#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target tangent_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "tangent/portable", .pass = Pass::tangent}; }

using TangentPortable = ::testing::TestWithParam<Case>;

TEST_P(TangentPortable, Gpu) {
  REQUIRE_GPU(70);
  if (const std::string reason = rejection(GetParam(), tangent_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), tangent_on_gpu());
}

TEST_P(TangentPortable, SameBits) {
  REQUIRE_GPU(70);
  if (const std::string reason = rejection(GetParam(), tangent_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), tangent_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Float32, TangentPortable, ::testing::ValuesIn(derivative_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, TangentPortable, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentPortable, ::testing::Values(all_at_once(Dtype::float32)), case_name);

}  // namespace
}  // namespace flash_attention::testing
