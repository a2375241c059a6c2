#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using StandardBackward = ::testing::TestWithParam<Case>;

TEST_P(StandardBackward, Emulated) { check_emulated(GetParam(), "standard/backward", Pass::standard_backward); }

INSTANTIATE_TEST_SUITE_P(Float32, StandardBackward, ::testing::ValuesIn(share_of(contract_cases(Dtype::float32), 48, 2)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, StandardBackward, ::testing::ValuesIn(share_of(nan_gradients(Dtype::float32), 8, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, StandardBackward, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 80)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
