#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target second_sm90_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "second/sm90", .pass = Pass::second}; }

using SecondSm90 = ::testing::TestWithParam<Case>;

TEST_P(SecondSm90, Gpu) {
  REQUIRE_GPU(90);
  if (const std::string reason = rejection(GetParam(), second_sm90_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), second_sm90_on_gpu());
}

TEST_P(SecondSm90, SameBits) {
  REQUIRE_GPU(90);
  if (const std::string reason = rejection(GetParam(), second_sm90_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), second_sm90_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondSm90, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
