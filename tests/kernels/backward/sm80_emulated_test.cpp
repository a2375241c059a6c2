#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using BackwardSm80 = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm80, Emulated) { check_emulated(GetParam(), "backward/sm80", Pass::backward); }

/// The loop over the tiles of one head after another, in the share of another kernel.
std::vector<Case> masks_by_heads() {
  std::vector<Case> cases = mask_cases(Dtype::bfloat16);
  std::erase_if(cases, [](const Case& c) { return c.name != "blocks_by_heads"; });
  return with_long_tail() ? std::vector<Case>{} : cases;
}

INSTANTIATE_TEST_SUITE_P(MasksByHeads, BackwardSm80, ::testing::ValuesIn(masks_by_heads()), case_name);
INSTANTIATE_TEST_SUITE_P(Masks, BackwardSm80, ::testing::ValuesIn(share_of(mask_cases(Dtype::bfloat16), 4, 1)), case_name);
INSTANTIATE_TEST_SUITE_P(MasksDeterministic, BackwardSm80,
                         ::testing::ValuesIn(some_of(deterministic(mask_cases(Dtype::float16)), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(Narrow, BackwardSm80, ::testing::ValuesIn(narrow_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm80, ::testing::ValuesIn(share_of(contract_cases(Dtype::bfloat16), 3, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Deterministic, BackwardSm80,
                         ::testing::ValuesIn(some_of(deterministic(contract_cases(Dtype::bfloat16)), 16)), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardSm80, ::testing::ValuesIn(nan_gradients(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(NanGradientsDeterministic, BackwardSm80,
                         ::testing::ValuesIn(share_of(deterministic(nan_gradients(Dtype::bfloat16)), 4, 0)), case_name);
INSTANTIATE_TEST_SUITE_P(NanBesideHiddenScores, BackwardSm80,
                         ::testing::ValuesIn(nan_beside_hidden_scores(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardSm80, ::testing::ValuesIn(some_of(contract_cases(Dtype::float16), 32)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
