#include "kernels/tf32_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using BackwardTf32 = ::testing::TestWithParam<Case>;

TEST_P(BackwardTf32, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), tf32_target(DeviceKind::cuda, "backward/tf32", Pass::backward));
}

TEST_P(BackwardTf32, SameBits) {
  REQUIRE_GPU(80);
  Case c = GetParam();
  c.problem.deterministic = true;
  check_reproducible(c, tf32_target(DeviceKind::cuda, "backward/tf32", Pass::backward));
}

INSTANTIATE_TEST_SUITE_P(Masks, BackwardTf32, ::testing::ValuesIn(fast(mask_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardTf32, ::testing::ValuesIn(fast(contract_cases(Dtype::float32))), case_name);

using BackwardTf32Accuracy = ::testing::TestWithParam<Case>;

/// Tensor cores cut sums off, which the emulator does not.
TEST_P(BackwardTf32Accuracy, OfThreeProducts) {
  REQUIRE_GPU(80);
  expect_fast_errors(GetParam(), DeviceKind::cuda, Pass::backward, "backward/portable", "backward/tf32",
                     {&Results::dq, &Results::dk, &Results::dv});
}
TEST_P(BackwardTf32Accuracy, OfOneProduct) {
  REQUIRE_GPU(80);
  expect_tf32_errors(GetParam(), DeviceKind::cuda, Pass::backward, "backward/tf32",
                     {&Results::dq, &Results::dk, &Results::dv});
}
INSTANTIATE_TEST_SUITE_P(Draws, BackwardTf32Accuracy, ::testing::ValuesIn(accuracy_cases()), case_name);

TEST(BackwardTf32Numbers, AreThoseOfFp32) {
  REQUIRE_GPU(80);
  for (const ExtremeCase& extreme : extreme_cases()) {
    SCOPED_TRACE(extreme.c.name);
    expect_same_numbers(extreme, DeviceKind::cuda, Pass::backward, "backward/tf32");
  }
}

}  // namespace
}  // namespace flash_attention::testing
