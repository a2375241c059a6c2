#pragma once

#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

/// What decode/mla_sm90 has edges of: rows of one tile and of several, KV blocks of either stage, parts.
inline std::vector<Case> mla_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.problem.latent = true, c.problem.head_dim = 576, c.problem.head_dim_v = 512;
    c.problem.seq_q = 1, c.problem.heads_q = 16, c.problem.heads_kv = 1;
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("mla_pages", [](Case& c, Problem& p) { p.seq_kv = 331, put_in_pages(c, 64, {331, 0, 70}); });
  add("mla_two_row_tiles", [](Case& c, Problem& p) { p.heads_q = 96, p.seq_kv = 259, put_in_pages(c, 16, {259, 64}); });
  add("mla_eight_row_tiles", [](Case& c, Problem& p) {  // more than the smaller GPU has SMs
    p.heads_q = 128, p.seq_q = 4, p.causal = true, put_in_pages(c, 32, {97, 131});
  });
  add("mla_boxes_two_row_tiles", [](Case& c, Problem& p) {
    p.heads_q = 128, p.seq_kv = 331, put_in_pages(c, 64, {331, 0, 256});
  });
  add("mla_boxes_two_tokens", [](Case& c, Problem& p) {
    p.heads_q = 128, p.seq_q = 2, p.causal = true, p.seq_kv = 259, put_in_pages(c, 128, {257, 192, 1});
  });
  add("mla_boxes_few_rows", [](Case&, Problem& p) { p.heads_q = 72, p.seq_kv = 515, p.batch = 1; });
  add("mla_two_tokens", [](Case& c, Problem& p) {
    p.seq_q = 2, p.causal = true, p.heads_q = 40, put_in_pages(c, 7, {131, 65, 1});
  });
  add("mla_no_pages", [](Case& c, Problem& p) {
    p.seq_q = 4, p.causal = p.seqused_kv = true, c.seqused_kv = {131, 3}, p.heads_q = 3;
  });
  add("mla_many_parts", [](Case& c, Problem& p) {  // merged in groups
    p.batch = 1, p.heads_q = 3, p.seq_kv = 1331, put_in_pages(c, 64, {1331});
  });
  add("mla_growing", [](Case& c, Problem& p) { c.draw = Draw::growing, p.seq_kv = 451, p.batch = 1; });
  add("mla_spike", [](Case& c, Problem& p) { c.draw = Draw::spike, p.seq_kv = 259, p.batch = 1; });
  add("mla_nan_value", [](Case& c, Problem& p) { c.nan_value = 130, p.seq_q = 3, p.causal = true; });
  add("mla_nan_key", [](Case& c, Problem& p) {
    c.nan_key = 129, p.seq_q = 3, p.causal = true, put_in_pages(c, 16, {131, 131});
  });
  add("mla_window", [](Case& c, Problem& p) {
    p.seq_q = 5, p.window_left = 70, p.causal = true, p.left_padding = true, c.left_padding = {70, 5}, p.sink = true;
  });
  add("mla_options", [](Case&, Problem& p) { p.softcap = 4, p.alibi = true, p.heads_q = 6, p.heads_kv = 2; });
  add("mla_values_alone", [](Case& c, Problem& p) {  // the whole key is the value
    p.head_dim = 512, p.seq_kv = 331, p.seq_q = 2, p.causal = true, put_in_pages(c, 64, {331, 0, 70});
  });
  add("mla_values_alone_many_rows", [](Case& c, Problem& p) {
    p.head_dim = 512, p.heads_q = 72, p.seq_kv = 451, p.batch = 1, c.draw = Draw::growing, put_in_pages(c, 16, {451});
  });
  add("mla_few_own_columns", [](Case& c, Problem& p) {
    p.head_dim = 536, p.seq_kv = 259, p.seq_q = 3, p.causal = true, c.nan_value = 257, put_in_pages(c, 128, {259, 130});
  });
  add("mla_values_alone_int8", [](Case& c, Problem& p) {
    p.head_dim = 512, p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::head, p.seq_q = 2, p.causal = true;
    put_in_pages(c, 64, {131, 0, 70});
  });
  add("mla_few_own_columns_e4m3", [](Case& c, Problem& p) {
    p.head_dim = 544, p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head, p.seq_kv = 259;
    put_in_pages(c, 64, {259, 33});
  });
  add("mla_bias", [](Case&, Problem& p) { p.bias = over(p, true, true, true), p.mask = over(p, true, false, true); });
  add("mla_packed_queries", [](Case& c, Problem& p) {
    pack(c, {3, 0, 1, 9}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.causal = true;
  });
  add("mla_no_key", [](Case& c, Problem& p) {  // nothing that a tensor map could describe
    pack(c, {3, 2}, {0, 0}), p.seq_kv = 5;
  });
  add("mla_e4m3", [](Case& c, Problem& p) {
    p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head, p.seq_q = 2, p.causal = true;
    put_in_pages(c, 64, {131, 0, 70});
  });
  add("mla_e4m3_equal_scales", [](Case& c, Problem& p) {  // of K and V, in some of the sequences
    p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head, p.seq_q = 1, p.batch = 8, c.power_scales = true;
    c.draw = Draw::growing, p.seq_kv = 131;
  });
  add("mla_e4m3_nan", [](Case& c, Problem& p) {
    p.kv_dtype = Dtype::float8_e4m3, p.seq_q = 2, p.causal = true, p.heads_q = 70, c.nan_value = 130;
    put_in_pages(c, 64, {131, 131});
  });
  add("mla_e5m2_nan", [](Case& c, Problem& p) {
    p.kv_dtype = Dtype::float8_e5m2, p.seq_q = 3, p.causal = true, c.nan_value = 130, put_in_pages(c, 16, {131, 131});
  });
  add("mla_int8_softcap",
      [](Case&, Problem& p) { p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::tensor, p.softcap = 5, p.heads_q = 70; });
  return cases;
}

}  // namespace flash_attention::testing
