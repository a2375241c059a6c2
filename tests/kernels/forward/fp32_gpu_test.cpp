#include "kernels/fp32_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using ForwardFp32 = ::testing::TestWithParam<Case>;

TEST_P(ForwardFp32, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), fp32_target(DeviceKind::cuda, "forward/fp32", Pass::forward));
}

INSTANTIATE_TEST_SUITE_P(Masks, ForwardFp32, ::testing::ValuesIn(ieee(mask_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, ForwardFp32, ::testing::ValuesIn(ieee(cache_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, ForwardFp32, ::testing::ValuesIn(ieee(contract_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Widths, ForwardFp32, ::testing::ValuesIn(fp32_widths()), case_name);

}  // namespace
}  // namespace flash_attention::testing
