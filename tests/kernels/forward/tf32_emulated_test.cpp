#include "kernels/tf32_cases.h"

namespace flash_attention::testing {
namespace {

using ForwardTf32 = ::testing::TestWithParam<Case>;

TEST_P(ForwardTf32, Emulated) { check_emulated(GetParam(), "forward/tf32", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Masks, ForwardTf32, ::testing::ValuesIn(some_of(fast(mask_cases(Dtype::float32)), 14)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardTf32, ::testing::ValuesIn(some_of(fast(cache_cases(Dtype::float32)), 12)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardTf32, ::testing::ValuesIn(some_of(fast(contract_cases(Dtype::float32)), 16)),
                         case_name);

using ForwardTf32Accuracy = ::testing::TestWithParam<Case>;

TEST_P(ForwardTf32Accuracy, OfThreeProducts) {
  expect_fast_errors(GetParam(), DeviceKind::emulator, Pass::forward, "forward/portable", "forward/tf32",
                     {&Results::out, &Results::lse});
}
TEST_P(ForwardTf32Accuracy, OfOneProduct) {
  expect_tf32_errors(GetParam(), DeviceKind::emulator, Pass::forward, "forward/tf32", {&Results::out});
}
INSTANTIATE_TEST_SUITE_P(Draws, ForwardTf32Accuracy, ::testing::ValuesIn(accuracy_cases()), case_name);

TEST(ForwardTf32Numbers, TinyValuesKeepTheirBits) {
  for (const double values : {0x1p-99, 0x1p-120}) {
    expect_fast_errors(accuracy_cases().front(), DeviceKind::emulator, Pass::forward, "forward/portable", "forward/tf32",
                       {&Results::out}, values);
  }
}

/// Infinite and huge numbers mean what they mean in fp32.
TEST(ForwardTf32Numbers, AreThoseOfFp32) {
  for (const ExtremeCase& extreme : extreme_cases()) {
    SCOPED_TRACE(extreme.c.name);
    expect_same_numbers(extreme, DeviceKind::emulator, Pass::forward, "forward/tf32");
  }
}

}  // namespace
}  // namespace flash_attention::testing
