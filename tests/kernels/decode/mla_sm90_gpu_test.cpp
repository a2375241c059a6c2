#include "kernels/decode/mla_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using DecodeMla = ::testing::TestWithParam<Case>;

TEST_P(DecodeMla, Gpu) {
  REQUIRE_GPU(90);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/mla_sm90"});
}

TEST_P(DecodeMla, SameBits) {
  REQUIRE_GPU(90);
  check_reproducible(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/mla_sm90"});
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeMla, ::testing::ValuesIn(mla_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, DecodeMla, ::testing::ValuesIn(mla_cases(Dtype::float16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
