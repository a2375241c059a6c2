#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using ForwardPortable = ::testing::TestWithParam<Case>;

TEST_P(ForwardPortable, Emulated) { check_emulated(GetParam(), "forward/portable", Pass::forward); }

TEST(ForwardPortableFarSequence, Emulated) { check_emulated(far_case(Dtype::float32), "forward/portable", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Masks, ForwardPortable, ::testing::ValuesIn(share_of(mask_cases(Dtype::float32), 6, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardPortable, ::testing::ValuesIn(share_of(cache_cases(Dtype::bfloat16), 2, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Latent, ForwardPortable, ::testing::ValuesIn(share_of(latent_cases(Dtype::bfloat16), 4, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardPortable, ::testing::ValuesIn(share_of(contract_cases(Dtype::float32), 3, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardPortable, ::testing::ValuesIn(some_of(contract_cases(Dtype::bfloat16), 48)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
