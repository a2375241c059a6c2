// forward/sm90 on a GPU: the whole contract.
#include "kernels/wide_cases.h"
#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

constexpr Device gpu{.kind = DeviceKind::cuda};

using ForwardSm90 = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90, KeepsTheContract) {
  REQUIRE_GPU(90);
  check(GetParam(), {gpu, "forward/sm90", Pass::forward});
}

INSTANTIATE_TEST_SUITE_P(Half, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::float16)), case_name);
using PairsOfWidePages = ::testing::TestWithParam<Case>;

TEST_P(PairsOfWidePages, KeepTheContract) {
  REQUIRE_GPU(90);
  check(GetParam(), {.device = gpu, .kernel = "forward/sm90", .tile = TileSize{128, 128}});
}

INSTANTIATE_TEST_SUITE_P(Loops, PairsOfWidePages, ::testing::ValuesIn(pairs_of_wide_pages()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, ForwardSm90, ::testing::ValuesIn(loops_of_wide_heads()), case_name);
INSTANTIATE_TEST_SUITE_P(WidePages, ForwardSm90, ::testing::ValuesIn(pages_of_wide_heads()), case_name);
INSTANTIATE_TEST_SUITE_P(BFloat, ForwardSm90, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);

/// More tiles than an H200 has SMs, so that blocks take several and slots are used again and again.
Case large(std::int64_t head_dim, bool causal, Draw draw) {
  Case c;
  c.name = "large_" + std::to_string(head_dim) + (causal ? "_causal" : "_full") + std::to_string(static_cast<int>(draw));
  c.problem = {.batch = 2,
               .seq_q = 300,
               .seq_kv = 400,
               .heads_q = 40,
               .heads_kv = 10,
               .head_dim = head_dim,
               .dtype = Dtype::bfloat16,
               .causal = causal};
  c.draw = draw;
  return c;
}

std::vector<Case> large_cases() {
  std::vector<Case> cases;
  for (bool causal : {false, true}) {
    for (std::int64_t dim : {64, 128, 256}) cases.push_back(large(dim, causal, Draw::normal));
    cases.push_back(large(128, causal, Draw::growing));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Large, ForwardSm90, ::testing::ValuesIn(large_cases()), case_name);

TEST(ForwardSm90Large, IsReproducible) {
  REQUIRE_GPU(90);
  check_reproducible(large(128, true, Draw::growing), {gpu, "forward/sm90", Pass::forward});
}

}  // namespace
}  // namespace flash_attention::testing
