#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using StandardForward = ::testing::TestWithParam<Case>;

TEST_P(StandardForward, Emulated) { check_emulated(GetParam(), "standard/forward", Pass::standard_forward); }

INSTANTIATE_TEST_SUITE_P(Float32, StandardForward, ::testing::ValuesIn(share_of(contract_cases(Dtype::float32), 24, 5)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, StandardForward, ::testing::ValuesIn(some_of(contract_cases(Dtype::bfloat16), 80)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
