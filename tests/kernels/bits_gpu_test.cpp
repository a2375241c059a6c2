#include <string_view>

#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using BitMasksGpu = ::testing::TestWithParam<Case>;

TEST_P(BitMasksGpu, EveryKernel) {
  REQUIRE_GPU(90);
  for (const char* kernel : {"decode/sm90", "decode/sm80", "forward/sm80", "forward/sm90", "forward/portable"}) {
    SCOPED_TRACE(kernel);
    const Problem& p = GetParam().problem;
    const bool windows = p.bit_mask.kind == BitMaskKind::none, few = p.seq_q <= 16 || p.page_size > 0;
    if (std::string_view(kernel) == "forward/sm90" && !windows) continue;
    if (std::string_view(kernel).starts_with("decode/") && !few) continue;
    if (std::string_view(kernel) == "decode/sm90" && p.page_size % 8 != 0) continue;
    check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = kernel});
  }
}

TEST_P(BitMasksGpu, SameBits) {
  REQUIRE_GPU(90);
  check_reproducible(GetParam(), {.device = {.kind = DeviceKind::cuda}});
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, BitMasksGpu, ::testing::ValuesIn(bit_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BitMasksGpu, ::testing::ValuesIn(bit_cases(Dtype::float16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
