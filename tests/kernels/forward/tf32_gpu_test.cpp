#include "kernels/tf32_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardTf32 = ::testing::TestWithParam<Case>;

TEST_P(ForwardTf32, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), tf32_target(DeviceKind::cuda, "forward/tf32", Pass::forward));
}

TEST_P(ForwardTf32, SameBits) {
  REQUIRE_GPU(80);
  Case c = GetParam();
  check_reproducible(c, tf32_target(DeviceKind::cuda, "forward/tf32", Pass::forward));
}

INSTANTIATE_TEST_SUITE_P(Masks, ForwardTf32, ::testing::ValuesIn(fast(mask_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardTf32, ::testing::ValuesIn(fast(cache_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardTf32, ::testing::ValuesIn(fast(contract_cases(Dtype::float32))), case_name);

using ForwardTf32Accuracy = ::testing::TestWithParam<Case>;

/// Tensor cores cut sums off, which the emulator does not.
TEST_P(ForwardTf32Accuracy, OfThreeProducts) {
  REQUIRE_GPU(80);
  expect_fast_errors(GetParam(), DeviceKind::cuda, Pass::forward, "forward/portable", "forward/tf32",
                     {&Results::out, &Results::lse});
}
TEST_P(ForwardTf32Accuracy, OfOneProduct) {
  REQUIRE_GPU(80);
  expect_tf32_errors(GetParam(), DeviceKind::cuda, Pass::forward, "forward/tf32", {&Results::out});
}
INSTANTIATE_TEST_SUITE_P(Draws, ForwardTf32Accuracy, ::testing::ValuesIn(accuracy_cases()), case_name);

TEST(ForwardTf32Numbers, AreThoseOfFp32) {
  REQUIRE_GPU(80);
  for (const ExtremeCase& extreme : extreme_cases()) {
    SCOPED_TRACE(extreme.c.name);
    expect_same_numbers(extreme, DeviceKind::cuda, Pass::forward, "forward/tf32");
  }
}

}  // namespace
}  // namespace flash_attention::testing
