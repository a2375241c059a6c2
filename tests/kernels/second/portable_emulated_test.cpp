#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target second_portable() {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "second/portable", .pass = Pass::second};
}

using SecondPortable = ::testing::TestWithParam<Case>;

TEST_P(SecondPortable, Emulated) { check_derivatives(GetParam(), second_portable()); }

INSTANTIATE_TEST_SUITE_P(Float32, SecondPortable, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float32), 13)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondPortable, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 64)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, SecondPortable, ::testing::Values(all_at_once()), case_name);

TEST(SecondPortable, EachTangentAlone) { check_each_tangent_alone(all_at_once(), second_portable()); }
TEST(SecondPortable, SameBits) { check_derivatives_reproducible(all_at_once(), second_portable()); }

}  // namespace
}  // namespace flash_attention::testing
