#pragma once

// Heads wider than 256 on sm_90: cases for the emulator and for a GPU.

#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

/// One sequence, one head, bfloat16.
inline Case wide(const char* name, std::int64_t dim, std::int64_t dim_v, std::int64_t seq_q, std::int64_t seq_kv,
          void (*change)(Case&, Problem&)) {
  Case c = base(name, Dtype::bfloat16);
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = 1;
  c.problem.head_dim = dim, c.problem.head_dim_v = dim_v, c.problem.seq_q = seq_q, c.problem.seq_kv = seq_kv;
  change(c, c.problem);
  return c;
}

inline void wide_lengths(Case& c, Problem& p) { p.causal = p.key_lengths = true, c.key_lengths = {630}; }

/// Few configurations, since each is compiled: edges, interior and late edges; rings that wrap around; tiles done again
/// with the running maximum, and again because of NaN behind a mask; tiles without keys.
inline std::vector<Case> loops_of_wide_heads() {
  return {
      wide("wide_causal", 512, 512, 200, 700, wide_lengths),
      wide("wide_growing", 512, 512, 250, 700, [](Case& c, Problem& p) { wide_lengths(c, p), c.draw = Draw::growing; }),
      wide("wide_falling", 512, 512, 130, 700, [](Case& c, Problem& p) { wide_lengths(c, p), c.draw = Draw::falling; }),
      wide("wide_large", 512, 512, 250, 700, [](Case& c, Problem& p) { wide_lengths(c, p), c.draw = Draw::large; }),
      wide("wide_nan_value", 512, 512, 200, 300,
           [](Case& c, Problem& p) { wide_lengths(c, p), c.key_lengths = {270}, c.nan_value = 230; }),
      wide("wide_nan_key", 512, 512, 200, 300,
           [](Case& c, Problem& p) { wide_lengths(c, p), c.key_lengths = {270}, c.nan_key = 230; }),
      wide("wide_empty_rows", 512, 512, 330, 70, [](Case& c, Problem& p) { wide_lengths(c, p), c.key_lengths = {60}; }),
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

/// Keys in pages that two blocks share, on request: tiles of 128 x 128.
inline std::vector<Case> pairs_of_wide_pages() {
  return {
      wide("wide_pages_in_pairs", 512, 512, 256, 401,
           [](Case& c, Problem&) { put_in_pages(c, 128, {401, 190}); }),
      wide("wide_pages_in_uneven_pairs", 512, 320, 577, 650,
           [](Case& c, Problem& p) { p.causal = true, put_in_pages(c, 64, {590, 650}); }),
  };
}

/// What forward/sm80 takes of them.
inline std::vector<Case> wide_heads_of_mma() {
  std::vector<Case> cases;
  for (const Case& c : loops_of_wide_heads()) {
    const Problem& p = c.problem;
    if (!p.mask.present && p.head_dim <= 512) cases.push_back(c);
  }
  cases.push_back(wide("wide_half_seen", 512, 384, 100, 150, [](Case& c, Problem& p) {
    p.causal = true, p.dropout_p = 0.3f, p.heads_q = 2, c.nan_value = 120;
  }));
  cases.push_back(wide("wide_odd_pages", 512, 512, 70, 131, [](Case& c, Problem& p) {
    p.causal = true;
    put_in_pages(c, 7, {131, 60});
  }));
  return cases;
}

/// Keys in pages: boxes of a page, of half of one, and of a stage of V.
inline std::vector<Case> pages_of_wide_heads() {
  return {
      wide("wide_pages", 512, 512, 151, 401,
           [](Case& c, Problem& p) {
             p.causal = true, p.batch = 3, p.heads_q = 2;
             put_in_pages(c, 64, {401, 0, 131});
           }),
      wide("wide_pages_nan_value", 512, 512, 100, 300,
           [](Case& c, Problem& p) {
             p.causal = true, c.nan_value = 250;
             put_in_pages(c, 256, {290});
           }),
      wide("wide_small_pages", 264, 512, 0, 0,
           [](Case& c, Problem& p) {
             p.seq_kv = 401, put_in_pages(c, 48, {60, 131, 17, 401});
             pack(c, {40, 0, 1, 149}, {0, 0, 0, 0}), p.seq_kv = 401, p.total_kv = 0, c.cu_seqlens_kv.clear();
             p.causal = true, p.window_left = 150;
           }),
      wide("wide_left_padding", 320, 136, 70, 300,
           [](Case& c, Problem& p) {
             p.dtype = Dtype::float16, p.batch = 2, p.left_padding = p.seqused_kv = true;
             c.left_padding = {61, 0}, c.seqused_kv = {300, 190};
           }),
      wide("wide_pages_of_options", 320, 136, 70, 300,
           [](Case& c, Problem& p) {
             p.dtype = Dtype::float16, p.softcap = 5, p.batch = 2, p.sink = true;
             p.left_padding = true, c.left_padding = {61, 0};
             put_in_pages(c, 96, {300, 190});
           }),
  };
}

// Gradients ------------------------------------------------------------------------------------------------------------

/// Few configurations, since each is compiled three times: odd and even numbers of steps, tasks without any, groups of
/// heads; NaN where some rows do not see it.
inline std::vector<Case> column_loops() {
  return {
      wide("columns_causal", 512, 512, 200, 330, [](Case&, Problem& p) { p.causal = true, p.heads_q = 2; }),
      wide("columns_empty_rows", 512, 512, 330, 70, [](Case&, Problem& p) { p.causal = true; }),
      wide("columns_nan_key", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_key = 130; }),
      wide("columns_nan_value", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_value = 130; }),
      wide("columns_nan_query", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_query = 5; }),
      wide("columns_nan_dout", 512, 512, 130, 200, [](Case& c, Problem& p) { p.causal = true, c.nan_dout = 5; }),
      wide("columns_options", 320, 64, 130, 190,
              [](Case& c, Problem& p) {
                p.dtype = Dtype::float16, p.softcap = 5, p.window_left = 100, p.window_right = 3, p.dropout_p = 0.2f;
                p.sink = c.dsink = c.dlse = true;
              }),
      wide("columns_bias_alibi", 264, 512, 70, 130,
              [](Case& c, Problem& p) { p.alibi = true, p.bias = over(p, true, true, true), c.dbias = true; }),
      wide("columns_packed", 64, 264, 0, 0,
              [](Case& c, Problem& p) {
                pack(c, {70, 0, 65, 130}, {100, 9, 0, 190}), p.causal = true;
              }),
      wide("columns_packed_nan_query", 512, 512, 0, 0,
              [](Case& c, Problem& p) {
                pack(c, {70, 0, 65, 130}, {100, 9, 64, 190}), p.causal = true, c.nan_query = 3;
              }),
  };
}

}  // namespace flash_attention::testing
