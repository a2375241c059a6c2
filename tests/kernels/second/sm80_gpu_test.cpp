#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target second_sm80_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "second/sm80", .pass = Pass::second}; }

using SecondSm80 = ::testing::TestWithParam<Case>;

TEST_P(SecondSm80, Gpu) {
  REQUIRE_GPU(80);
  if (const std::string reason = rejection(GetParam(), second_sm80_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), second_sm80_on_gpu());
}

TEST_P(SecondSm80, SameBits) {
  REQUIRE_GPU(80);
  if (const std::string reason = rejection(GetParam(), second_sm80_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), second_sm80_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondSm80, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
