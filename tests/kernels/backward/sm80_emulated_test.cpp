#include <algorithm>

#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using BackwardSm80 = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm80, Emulated) { check_emulated(GetParam(), "backward/sm80", Pass::backward); }

/// This kernel's share, and the loop over the tiles of one head after another, whosever share it is in.
std::vector<Case> masks() {
  std::vector<Case> cases = mask_cases(Dtype::bfloat16);
  const std::vector<Case> share = share_of(cases, 4, 1);
  std::erase_if(cases, [&](const Case& c) {
    const bool own = std::any_of(share.begin(), share.end(), [&](const Case& other) { return other.name == c.name; });
    return !own && c.name != "blocks_by_heads";
  });
  return cases;
}

/// Tiles of queries that see none of the keys: their Q and dO come for nothing, and dQ goes where they land.
std::vector<Case> hidden_queries() {
  Case c = base("hidden_queries", Dtype::bfloat16);
  Problem& p = c.problem;
  p.seq_q = 300, p.seq_kv = 70, p.deterministic = true;
  p.block_mask = {.block_q = 128, .block_kv = 128, .batch_stride = 1, .head_stride = 1};
  make_masks_dense(p);
  return {c};
}

INSTANTIATE_TEST_SUITE_P(Masks, BackwardSm80, ::testing::ValuesIn(masks()), case_name);
INSTANTIATE_TEST_SUITE_P(MasksDeterministic, BackwardSm80,
                         ::testing::ValuesIn(some_of(deterministic(mask_cases(Dtype::float16)), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(MasksOfAllKeys, BackwardSm80, ::testing::ValuesIn(hidden_queries()), case_name);
INSTANTIATE_TEST_SUITE_P(Narrow, BackwardSm80, ::testing::ValuesIn(narrow_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm80, ::testing::ValuesIn(share_of(contract_cases(Dtype::bfloat16), 6, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Deterministic, BackwardSm80,
                         ::testing::ValuesIn(some_of(deterministic(contract_cases(Dtype::bfloat16)), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardSm80, ::testing::ValuesIn(share_of(nan_gradients(Dtype::bfloat16), 2, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradientsDeterministic, BackwardSm80,
                         ::testing::ValuesIn(share_of(deterministic(nan_gradients(Dtype::bfloat16)), 8, 0)), case_name);
INSTANTIATE_TEST_SUITE_P(NanBesideHiddenScores, BackwardSm80,
                         ::testing::ValuesIn(nan_beside_hidden_scores(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardSm80, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 64)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
