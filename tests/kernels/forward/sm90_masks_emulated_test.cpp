// forward/sm90 where hidden rows or a block mask choose the blocks of keys, in the emulator.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using ForwardSm90Masks = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Masks, KeepTheContract) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

/// Lists of many blocks, with holes: rings of stages come round, and open blocks lie between tested ones.
std::vector<Case> long_lists() {
  std::vector<Case> cases;
  const auto add = [&](auto... arguments) { cases.push_back(documents_case(arguments...)); };
  add("documents_of_300", 1031, 300, 1, [](Case&, Problem& p) { p.causal = true; });
  add("documents_both_ways", 901, 400, 4, [](Case&, Problem& p) { p.head_dim = 128; });
  add("rows_at_random", 521, 0, 2, [](Case&, Problem&) {});
  add("open_then_growing", 700, 650, 4, [](Case& c, Problem&) { c.draw = Draw::growing; });
  add("falling_documents", 701, 200, 1, [](Case& c, Problem& p) { c.draw = Draw::falling, p.causal = true; });
  add("large_documents", 701, 200, 1, [](Case& c, Problem& p) { c.draw = Draw::large, p.causal = true; });
  add("from_the_diagonal", 521, 260, 1, [](Case& c, Problem& p) { p.alibi = c.strong_slopes = true, p.causal = true; });
  add("in_a_window", 521, 260, 1, [](Case&, Problem& p) { p.window_left = 100, p.causal = true; });
  add("fewer_keys", 521, 260, 4, [](Case& c, Problem& p) { p.key_lengths = true, c.key_lengths = {390}; });
  add("nan_behind", 521, 260, 4, [](Case& c, Problem&) { c.nan_value = 270; });
  add("drops", 521, 260, 4, [](Case&, Problem& p) { p.dropout_p = 0.2f, p.softcap = 5; });
  add("wide_heads", 389, 200, 1, [](Case&, Problem& p) { p.head_dim = 256, p.causal = true; });
  add("edges_without_words", 521, 600, 4, [](Case&, Problem& p) { p.head_dim = 128, p.causal = true; });
  add("words_beside_edges", 650, 300, 4, [](Case&, Problem& p) { p.causal = true; });
  add("rows_of_many_heads", 261, 150, 4, [](Case&, Problem& p) { p.heads_q = p.heads_kv = 8; });
  add("found_again", 700, 650, 1, [](Case& c, Problem& p) {  // a warp of its own finds tiles, also those that are repeated
    c.draw = Draw::growing, p.heads_q = p.heads_kv = 8, p.causal = true;
  });
  add("found_without_keys", 900, 120, 4, [](Case& c, Problem& p) {  // rows that see nothing, NaN behind others
    p.heads_q = p.heads_kv = 8, p.window_left = 20, c.nan_value = 130;
  });
  add("grouped_heads", 389, 200, 1, [](Case& c, Problem& p) { p.heads_q = 8, p.causal = true, c.nan_value = 210; });
  add("bytes_of_many_heads", 197, 0, 0, [](Case&, Problem& p) {
    p.heads_q = p.heads_kv = 8, p.head_dim = 256;
    p.mask = over(p, false, false, true);
  });
  add("bytes_together", 384, 0, 0, [](Case&, Problem& p) { p.head_dim = 128, p.mask = over(p, false, false, true); });
  add("bytes_one_by_one", 389, 0, 0, [](Case&, Problem& p) { p.mask = over(p, false, true, true), p.causal = true; });
  add("bytes_256", 200, 0, 0, [](Case&, Problem& p) { p.head_dim = 256, p.mask = over(p, false, false, true); });
  add("bytes_of_each_sequence", 389, 150, 0, [](Case& c, Problem& p) {  // words of each, full and hidden tiles between
    p.batch = 2, p.heads_q = 4, p.mask = over(p, true, false, true), c.nan_value = 160;
  });
  add("bytes_of_each_head", 260, 0, 0, [](Case&, Problem& p) {
    p.batch = 2, p.heads_q = 4, p.mask = over(p, true, true, true), p.window_left = 100, p.causal = true;
  });
  add("bytes_of_keys", 200, 0, 0, [](Case&, Problem& p) { p.batch = 3, p.mask = over(p, true, false, false); });
  add("bytes_of_fewer_keys", 300, 0, 0, [](Case& c, Problem& p) {
    p.batch = 2, p.mask = over(p, false, false, true), p.causal = true;
    p.key_lengths = true, c.key_lengths = {290, 131}, c.nan_value = 140;
  });
  add("bytes_of_used_rows", 270, 0, 0, [](Case& c, Problem& p) {  // edges differ by sequence
    p.batch = 2, p.mask = over(p, true, true, true), p.window_left = 90, p.causal = true;
    p.seqused_q = p.seqused_kv = p.left_padding = true;
    c.seqused_q = {200, 270}, c.seqused_kv = {270, 151}, c.left_padding = {70, 5};
  });
  add("with_a_mask", 389, 200, 1, [](Case&, Problem& p) { p.mask = over(p, false, false, true); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Contract, ForwardSm90Masks, ::testing::ValuesIn(share_of(mask_cases(Dtype::bfloat16), 3, 1, 2)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Long, ForwardSm90Masks, ::testing::ValuesIn(long_lists()), case_name);

}  // namespace
}  // namespace flash_attention::testing
