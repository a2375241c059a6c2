#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using NarrowKeysGpu = ::testing::TestWithParam<Case>;

TEST_P(NarrowKeysGpu, DecodeSm80) {
  REQUIRE_GPU(80);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm80"});
}

TEST_P(NarrowKeysGpu, Portable) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/portable"});
}

TEST_P(NarrowKeysGpu, HasTheBitsOfSixteen) {
  REQUIRE_GPU(90);  // before, tensor cores add the products of an instruction in two parts
  check_narrow_bits(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm80"});
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, NarrowKeysGpu, ::testing::ValuesIn(narrow_key_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, NarrowKeysGpu, ::testing::ValuesIn(narrow_key_cases(Dtype::float16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
