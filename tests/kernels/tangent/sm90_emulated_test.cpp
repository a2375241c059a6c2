#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target tangent_sm90() {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "tangent/sm90", .pass = Pass::tangent};
}

using TangentSm90 = ::testing::TestWithParam<Case>;

TEST_P(TangentSm90, Emulated) {
  if (const std::string reason = rejection(GetParam(), tangent_sm90()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), tangent_sm90());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, TangentSm90, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 11)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, TangentSm90, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float16), 17)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, TangentSm90,
                         ::testing::Values(all_at_once(Dtype::float16), programmed(Dtype::bfloat16),
                                           contract_case("head_dim_128", Dtype::bfloat16),
                                           contract_case("everything", Dtype::float16)),
                         case_name);

TEST(TangentSm90, EachTangentAlone) { check_each_tangent_alone(all_at_once(Dtype::bfloat16), tangent_sm90()); }
TEST(TangentSm90, SameBits) { check_derivatives_reproducible(all_at_once(Dtype::bfloat16), tangent_sm90()); }

}  // namespace
}  // namespace flash_attention::testing
