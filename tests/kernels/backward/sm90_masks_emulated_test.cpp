// backward/sm90 where hidden rows, a block mask or a boolean mask choose the steps of a task, in the emulator.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using BackwardSm90Masks = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Masks, KeepTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 2); }

/// Many steps with holes between them: documents, several heads, dQ by a kernel of its own.
std::vector<Case> masked_steps() {
  std::vector<Case> cases;
  const auto add = [&](auto... arguments) { cases.push_back(documents_case(arguments...)); };
  add("documents_of_300", 1031, 300, 1, [](Case&, Problem& p) { p.causal = true; });
  add("both_ways_128", 521, 200, 4, [](Case&, Problem& p) { p.head_dim = 128; });
  add("causal_128_group", 521, 200, 1, [](Case&, Problem& p) { p.head_dim = 128, p.heads_q = 4, p.causal = true; });
  add("apart", 521, 200, 1, [](Case&, Problem& p) { p.deterministic = p.causal = true; });
  add("apart_128", 389, 150, 4, [](Case& c, Problem& p) { p.head_dim = 128, p.deterministic = true, c.nan_key = 160; });
  add("apart_by_softcap", 389, 150, 4, [](Case&, Problem& p) { p.head_dim = 128, p.softcap = 5; });
  add("bytes_together", 384, 0, 0, [](Case&, Problem& p) { p.head_dim = 128, p.mask = over(p, false, false, true); });
  add("bytes_one_by_one", 389, 0, 0, [](Case&, Problem& p) { p.mask = over(p, false, true, true), p.causal = true; });
  add("bytes_apart", 200, 0, 0, [](Case&, Problem& p) { p.deterministic = true, p.mask = over(p, false, false, true); });
  add("bytes_256", 200, 0, 0, [](Case&, Problem& p) { p.head_dim = 256, p.mask = over(p, false, false, true); });
  // The queries of the first tile of keys come in parts, some of which see nothing of it.
  add("parts_of_bytes", 2100, 0, 0, [](Case&, Problem& p) { p.seq_kv = 200, p.mask = over(p, false, false, true); });
  add("parts_128_group", 2100, 1500, 1, [](Case&, Problem& p) { p.seq_kv = 300, p.head_dim = 128, p.heads_q = 2; });
  add("parts_and_nan", 2100, 0, 2, [](Case& c, Problem& p) { p.seq_kv = 150, p.head_dim = 32, c.nan_query = 1030; });
  add("by_heads", 389, 150, 4, [](Case&, Problem& p) { p.hidden_rows.head_stride = 1, p.heads_q = 4; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Contract, BackwardSm90Masks, ::testing::ValuesIn(share_of(mask_cases(Dtype::bfloat16), 4, 2, 2)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Long, BackwardSm90Masks, ::testing::ValuesIn(masked_steps()), case_name);

}  // namespace
}  // namespace flash_attention::testing
