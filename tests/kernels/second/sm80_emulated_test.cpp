#include "kernels/emulated.h"
#include "support/cases/derivative_cases.h"

namespace flash_attention::testing {
namespace {

Target second_sm80(int arch = 80) {
  return {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "second/sm80", .pass = Pass::second};
}

using SecondSm80 = ::testing::TestWithParam<Case>;

TEST_P(SecondSm80, Emulated) {
  if (const std::string reason = rejection(GetParam(), second_sm80()); !reason.empty()) GTEST_SKIP() << reason;
  check_derivatives(GetParam(), second_sm80());
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, SecondSm80, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 9)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(AllAtOnce, SecondSm80,
                         ::testing::Values(without_dropout(all_at_once(Dtype::bfloat16)),
                                           contract_case("head_dim_128", Dtype::bfloat16),
                                           without_dropout(contract_case("everything", Dtype::bfloat16))),
                         case_name);

TEST(SecondSm80, EachTangentAlone) {
  check_each_tangent_alone(without_dropout(all_at_once(Dtype::bfloat16)), second_sm80(90));
}
TEST(SecondSm80, SameBits) {
  check_derivatives_reproducible(without_dropout(all_at_once(Dtype::bfloat16)), second_sm80());
}

}  // namespace
}  // namespace flash_attention::testing
