#include "kernels/decode/cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using DecodeSm80 = ::testing::TestWithParam<Case>;

TEST_P(DecodeSm80, Gpu) {
  REQUIRE_GPU(80);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm80"});
}

TEST_P(DecodeSm80, SameBits) {
  REQUIRE_GPU(80);
  check_reproducible(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm80"});
}

using DecodeSm90 = ::testing::TestWithParam<Case>;

TEST_P(DecodeSm90, Gpu) {
  REQUIRE_GPU(90);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm90"});
}

TEST_P(DecodeSm90, SameBits) {
  REQUIRE_GPU(90);
  check_reproducible(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "decode/sm90"});
}

INSTANTIATE_TEST_SUITE_P(Boxes, DecodeSm90, ::testing::ValuesIn(box_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, DecodeSm90, ::testing::ValuesIn(wide_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(Latent, DecodeSm80, ::testing::ValuesIn(latent_16_bits()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, DecodeSm80, ::testing::ValuesIn(wide_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeSm90, ::testing::ValuesIn(decode_shapes()), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, DecodeSm90, ::testing::ValuesIn(cache_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeSm90, ::testing::ValuesIn(few_queries(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeSm80, ::testing::ValuesIn(decode_shapes()), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, DecodeSm80, ::testing::ValuesIn(cache_cases(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, DecodeSm80, ::testing::ValuesIn(few_queries(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeSm80, ::testing::ValuesIn(few_queries(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
