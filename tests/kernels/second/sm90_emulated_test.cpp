#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target second_sm90() {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "second/sm90", .pass = Pass::second};
}

using SecondSm90 = ::testing::TestWithParam<Case>;

TEST_P(SecondSm90, Emulated) {
  if (const std::string reason = rejection(GetParam(), second_sm90()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), second_sm90());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondSm90, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 10)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, SecondSm90,
                         ::testing::Values(without_dropout(all_at_once(Dtype::bfloat16)),
                                           contract_case("head_dim_128", Dtype::bfloat16),
                                           without_dropout(contract_case("everything", Dtype::bfloat16))),
                         case_name);

TEST(SecondSm90, EachTangentAlone) {
  check_each_tangent_alone(without_dropout(all_at_once(Dtype::bfloat16)), second_sm90());
}
TEST(SecondSm90, SameBits) {
  check_derivatives_reproducible(without_dropout(all_at_once(Dtype::bfloat16)), second_sm90());
}

}  // namespace
}  // namespace flash_attention::testing
