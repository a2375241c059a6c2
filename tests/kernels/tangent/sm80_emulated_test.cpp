#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target tangent_sm80(int arch = 80) {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "tangent/sm80", .pass = Pass::tangent};
}

using TangentSm80 = ::testing::TestWithParam<Case>;

TEST_P(TangentSm80, Emulated) {
  if (const std::string reason = rejection(GetParam(), tangent_sm80()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), tangent_sm80());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TangentSm80, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 7)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, TangentSm80, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float16), 13)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentSm80,
                         ::testing::Values(all_at_once(Dtype::float16), programmed(Dtype::bfloat16),
                                           contract_case("head_dim_128", Dtype::bfloat16),
                                           contract_case("everything", Dtype::float16)),
                         case_name);

TEST(TangentSm80, EachTangentAlone) { check_each_tangent_alone(all_at_once(Dtype::bfloat16), tangent_sm80(90)); }
TEST(TangentSm80, SameBits) { check_derivatives_reproducible(all_at_once(Dtype::bfloat16), tangent_sm80()); }

}  // namespace
}  // namespace flash_attention::testing
