// backward/mla_sm90 on a GPU.
#include "kernels/backward/mla_cases.h"
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using MlaBackward = ::testing::TestWithParam<Case>;

TEST_P(MlaBackward, Gpu) {
  REQUIRE_GPU(90);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/mla_sm90", .pass = Pass::backward});
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, MlaBackward, ::testing::ValuesIn(mla_backward_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
