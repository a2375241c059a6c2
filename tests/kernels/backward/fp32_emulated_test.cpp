#include "kernels/fp32_cases.h"

namespace flash_attention::testing {
namespace {

using BackwardFp32 = ::testing::TestWithParam<Case>;

TEST_P(BackwardFp32, Emulated) { check_emulated(GetParam(), "backward/fp32", Pass::backward); }

INSTANTIATE_TEST_SUITE_P(Masks, BackwardFp32, ::testing::ValuesIn(some_of(ieee(mask_cases(Dtype::float32)), 24)), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardFp32, ::testing::ValuesIn(some_of(ieee(nan_gradients(Dtype::float32)), 8)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardFp32, ::testing::ValuesIn(some_of(ieee(contract_cases(Dtype::float32)), 20)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Deterministic, BackwardFp32,
                         ::testing::ValuesIn(some_of(deterministic(ieee(contract_cases(Dtype::float32))), 40)), case_name);
INSTANTIATE_TEST_SUITE_P(DeterministicWidths, BackwardFp32, ::testing::ValuesIn(deterministic(fp32_widths())), case_name);
INSTANTIATE_TEST_SUITE_P(Widths, BackwardFp32, ::testing::ValuesIn(fp32_widths()), case_name);

}  // namespace
}  // namespace flash_attention::testing
