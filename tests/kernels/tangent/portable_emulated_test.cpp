#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target tangent_portable() {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "tangent/portable", .pass = Pass::tangent};
}

using TangentPortable = ::testing::TestWithParam<Case>;

TEST_P(TangentPortable, Emulated) { check_derivatives(GetParam(), tangent_portable()); }

INSTANTIATE_TEST_SUITE_P(Float32, TangentPortable, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float32), 9)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, TangentPortable, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float16), 64)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentPortable, ::testing::Values(all_at_once(), programmed(Dtype::float32)), case_name);

TEST(TangentPortable, EachTangentAlone) { check_each_tangent_alone(all_at_once(), tangent_portable()); }
TEST(TangentPortable, SameBits) { check_derivatives_reproducible(all_at_once(), tangent_portable()); }

}  // namespace
}  // namespace flash_attention::testing
