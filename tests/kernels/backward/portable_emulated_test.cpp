#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using BackwardPortable = ::testing::TestWithParam<Case>;

TEST_P(BackwardPortable, Emulated) { check_emulated(GetParam(), "backward/portable", Pass::backward); }

INSTANTIATE_TEST_SUITE_P(Masks, BackwardPortable, ::testing::ValuesIn(share_of(mask_cases(Dtype::float32), 4, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardPortable, ::testing::ValuesIn(share_of(contract_cases(Dtype::float32), 3, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Slopes, BackwardPortable, ::testing::Values(contract_case("softcap_far", Dtype::float32)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardPortable, ::testing::ValuesIn(share_of(nan_gradients(Dtype::float32), 4, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardPortable, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 64)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
