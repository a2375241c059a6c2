// forward/sm90 with head dimensions above 256, in the emulator: two warpgroups that share their rows.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using ForwardSm90Wide = ::testing::TestWithParam<Case>;

TEST_P(ForwardSm90Wide, KeepsTheContract) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

/// One sequence, one key head, bfloat16.
Case wide(const char* name, std::int64_t dim, std::int64_t dim_v, std::int64_t seq_q, std::int64_t seq_kv,
          void (*change)(Case&, Problem&)) {
  Case c = base(name, Dtype::bfloat16);
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = 1;
  c.problem.head_dim = dim, c.problem.head_dim_v = dim_v, c.problem.seq_q = seq_q, c.problem.seq_kv = seq_kv;
  change(c, c.problem);
  return c;
}

void lengths(Case& c, Problem& p) { p.causal = p.key_lengths = true, c.key_lengths = {630}; }

/// Few configurations, since each is compiled: edges, interior and late edges; rings that come round; tiles done again
/// with the running maximum, and again because of what is behind a mask; tiles without keys.
std::vector<Case> loops_of_wide_heads() {
  return {
      wide("wide_causal", 512, 512, 200, 700, lengths),
      wide("wide_growing", 512, 512, 250, 700, [](Case& c, Problem& p) { lengths(c, p), c.draw = Draw::growing; }),
      wide("wide_falling", 512, 512, 130, 700, [](Case& c, Problem& p) { lengths(c, p), c.draw = Draw::falling; }),
      wide("wide_large", 512, 512, 250, 700, [](Case& c, Problem& p) { lengths(c, p), c.draw = Draw::large; }),
      wide("wide_nan_value", 512, 512, 200, 300,
           [](Case& c, Problem& p) { lengths(c, p), c.key_lengths = {270}, c.nan_value = 230; }),
      wide("wide_nan_key", 512, 512, 200, 300,
           [](Case& c, Problem& p) { lengths(c, p), c.key_lengths = {270}, c.nan_key = 230; }),
      wide("wide_empty_rows", 512, 512, 330, 70, [](Case& c, Problem& p) { lengths(c, p), c.key_lengths = {60}; }),
      wide("wide_options", 320, 328, 150, 400,
           [](Case&, Problem& p) {
             p.dtype = Dtype::float16, p.softcap = 5, p.window_left = 150, p.window_right = 3, p.dropout_p = 0.2f;
             p.sink = true, p.heads_q = 2;
           }),
      wide("wide_alibi", 264, 512, 150, 400, [](Case& c, Problem& p) { p.alibi = c.strong_slopes = p.causal = true; }),
      wide("wide_mask_bias", 512, 64, 100, 300,
           [](Case& c, Problem& p) {
             p.mask = over(p, true, true, true), p.bias = over(p, true, true, true), c.infinite_bias = true;
           }),
      wide("wide_packed", 64, 264, 0, 0,
           [](Case& c, Problem& p) {
             pack(c, {70, 0, 65, 130}, {300, 9, 0, 190}), p.causal = true;
           }),
      wide("wide_latent", 576, 512, 67, 520, [](Case&, Problem&) {}),
  };
}

/// Masks that choose the blocks.
std::vector<Case> lists_of_wide_heads() {
  return {documents_case("wide_documents", 521, 260, 4,
                         [](Case& c, Problem& p) {
                           p.head_dim = 512, p.head_dim_v = 264, p.heads_q = p.heads_kv = 1, c.nan_value = 270;
                         }),
          // Rows that see nothing but -inf, in blocks that no mask hides a part of.
          documents_case("wide_infinite_bias", 300, 300, 4, [](Case& c, Problem& p) {
            p.head_dim = 384, p.head_dim_v = 64, p.heads_q = p.heads_kv = 1, p.seq_q = 70;
            p.bias = over(p, false, true, true, p.dtype), c.infinite_bias = true;
          })};
}

INSTANTIATE_TEST_SUITE_P(Loops, ForwardSm90Wide, ::testing::ValuesIn(loops_of_wide_heads()), case_name);
INSTANTIATE_TEST_SUITE_P(Lists, ForwardSm90Wide, ::testing::ValuesIn(lists_of_wide_heads()), case_name);

}  // namespace
}  // namespace flash_attention::testing
