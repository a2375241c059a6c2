// Prompts whose keys lie in pages, on a GPU.
#include "kernels/forward/paged_cases.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

constexpr Device paged_gpu{.kind = DeviceKind::cuda};

using PagedPrompts = ::testing::TestWithParam<Case>;

TEST_P(PagedPrompts, ByBoxesOfTma) {
  REQUIRE_GPU(90);
  check(GetParam(), {paged_gpu, "forward/sm90", Pass::forward});
}

TEST_P(PagedPrompts, ByCopiesOfRows) {
  REQUIRE_GPU(80);
  check(GetParam(), {paged_gpu, "forward/sm80", Pass::forward});
}

TEST_P(PagedPrompts, HaveTheSameBitsAgain) {
  REQUIRE_GPU(90);
  check_reproducible(GetParam(), {paged_gpu, "forward/sm90", Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Float16, PagedPrompts, ::testing::ValuesIn(paged_prompts(Dtype::float16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, PagedPrompts, ::testing::ValuesIn(paged_prompts(Dtype::bfloat16)), case_name);

using OddPages = ::testing::TestWithParam<Case>;

TEST_P(OddPages, ByCopiesOfRows) {
  REQUIRE_GPU(80);
  check(GetParam(), {paged_gpu, "forward/sm80", Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, OddPages, ::testing::ValuesIn(odd_pages(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
