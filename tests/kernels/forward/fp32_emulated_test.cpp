#include "kernels/fp32_cases.h"

namespace flash_attention::testing {
namespace {

using ForwardFp32 = ::testing::TestWithParam<Case>;

TEST_P(ForwardFp32, Emulated) { check_emulated(GetParam(), "forward/fp32", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Masks, ForwardFp32, ::testing::ValuesIn(some_of(ieee(mask_cases(Dtype::float32)), 24)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardFp32, ::testing::ValuesIn(some_of(ieee(cache_cases(Dtype::float32)), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardFp32, ::testing::ValuesIn(some_of(ieee(contract_cases(Dtype::float32)), 20)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Widths, ForwardFp32, ::testing::ValuesIn(fp32_widths()), case_name);

}  // namespace
}  // namespace flash_attention::testing
