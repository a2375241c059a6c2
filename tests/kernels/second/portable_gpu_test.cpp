#include "support/cases/derivative_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

Target second_on_gpu() { return {.device = {.kind = DeviceKind::cuda}, .kernel = "second/portable", .pass = Pass::second}; }

using SecondPortable = ::testing::TestWithParam<Case>;

TEST_P(SecondPortable, Gpu) {
  REQUIRE_GPU(70);
  if (const std::string reason = rejection(GetParam(), second_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), second_on_gpu());
}

TEST_P(SecondPortable, SameBits) {
  REQUIRE_GPU(70);
  if (const std::string reason = rejection(GetParam(), second_on_gpu()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives_reproducible(GetParam(), second_on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Float32, SecondPortable, ::testing::ValuesIn(derivative_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondPortable, ::testing::ValuesIn(derivative_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, SecondPortable, ::testing::Values(all_at_once(Dtype::float32)), case_name);

}  // namespace
}  // namespace flash_attention::testing
