#include "kernels/emulated.h"
#include "kernels/wide_cases.h"

namespace flash_attention::testing {
namespace {

using ForwardSm80 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm80, Emulated) { check_emulated(GetParam(), "forward/sm80", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Masks, ForwardSm80, ::testing::ValuesIn(share_of(mask_cases(Dtype::bfloat16), 6, 3)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardSm80, ::testing::ValuesIn(share_of(cache_cases(Dtype::bfloat16), 2, 1)), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, ForwardSm80, ::testing::ValuesIn(wide_heads_of_mma()), case_name);
INSTANTIATE_TEST_SUITE_P(Narrow, ForwardSm80, ::testing::ValuesIn(narrow_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardSm80, ::testing::ValuesIn(share_of(contract_cases(Dtype::bfloat16), 3, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, ForwardSm80, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 48)), case_name);

}  // namespace
}  // namespace flash_attention::testing
