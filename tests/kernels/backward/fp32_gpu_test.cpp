#include "kernels/fp32_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using BackwardFp32 = ::testing::TestWithParam<Case>;

TEST_P(BackwardFp32, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), fp32_target(DeviceKind::cuda, "backward/fp32", Pass::backward));
}

TEST_P(BackwardFp32, SameBits) {
  REQUIRE_GPU(80);
  Case c = GetParam();
  c.problem.deterministic = true;
  check_reproducible(c, fp32_target(DeviceKind::cuda, "backward/fp32", Pass::backward));
}

INSTANTIATE_TEST_SUITE_P(Masks, BackwardFp32, ::testing::ValuesIn(ieee(mask_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardFp32, ::testing::ValuesIn(ieee(nan_gradients(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardFp32, ::testing::ValuesIn(ieee(contract_cases(Dtype::float32))), case_name);
INSTANTIATE_TEST_SUITE_P(Widths, BackwardFp32, ::testing::ValuesIn(fp32_widths()), case_name);

}  // namespace
}  // namespace flash_attention::testing
