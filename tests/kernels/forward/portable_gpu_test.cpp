#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardPortable = ::testing::TestWithParam<Case>;

TEST_P(ForwardPortable, Gpu) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/portable", .pass = Pass::forward});
}

TEST_P(ForwardPortable, SameBits) {
  REQUIRE_GPU(70);
  check_reproducible(GetParam(),
                     {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/portable", .pass = Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Masks, ForwardPortable, ::testing::ValuesIn(mask_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardPortable, ::testing::ValuesIn(cache_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Latent, ForwardPortable, ::testing::ValuesIn(latent_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardPortable, ::testing::ValuesIn(contract_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, ForwardPortable, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ForwardPortable, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
