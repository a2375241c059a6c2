#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using BackwardPortable = ::testing::TestWithParam<Case>;

TEST_P(BackwardPortable, Gpu) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/portable", .pass = Pass::backward});
}

TEST_P(BackwardPortable, SameBits) {
  REQUIRE_GPU(70);
  check_reproducible(GetParam(),
                     {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/portable", .pass = Pass::backward});
}

INSTANTIATE_TEST_SUITE_P(Masks, BackwardPortable, ::testing::ValuesIn(mask_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardPortable, ::testing::ValuesIn(contract_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardPortable, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardPortable, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
