#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

std::vector<Case> narrow_query_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Dtype codes, ScaleKind scales, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    Problem& p = c.problem;
    p.q_dtype = p.kv_dtype = codes, p.q_scales = p.kv_scales = scales;
    p.batch = 1;
    change(c, p);
    cases.push_back(std::move(c));
  };
  constexpr Dtype e4m3 = Dtype::float8_e4m3, e5m2 = Dtype::float8_e5m2;
  add("q8_plain", e4m3, ScaleKind::none, [](Case&, Problem& p) { p.seq_kv = 400; });
  add("q8_e5m2", e5m2, ScaleKind::none, [](Case&, Problem& p) { p.head_dim = 128, p.causal = true; });
  add("q8_tensor", e4m3, ScaleKind::tensor, [](Case&, Problem& p) { p.heads_q = 4, p.causal = true; });
  add("q8_head", e4m3, ScaleKind::head, [](Case&, Problem& p) {
    p.heads_q = 4, p.head_dim = 128, p.causal = true, p.seq_q = 210, p.seq_kv = 210, p.batch = 2;
  });
  add("q8_window", e4m3, ScaleKind::head,
      [](Case&, Problem& p) { p.window_left = 60, p.window_right = 5, p.head_dim = 128; });
  add("q8_softcap", e5m2, ScaleKind::head,
      [](Case&, Problem& p) { p.softcap = 3, p.causal = true, p.alignment = Alignment::top_left; });
  add("q8_packed", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    pack(c, {70, 0, 129, 5}, {70, 64, 200, 1}), p.heads_q = 4, p.causal = true;
  });
  add("q8_key_lengths", e4m3, ScaleKind::tensor, [](Case& c, Problem& p) {
    p.batch = 2, p.key_lengths = true, c.key_lengths = {131, 70}, p.head_dim = 128;
  });
  add("q8_used", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.batch = 2, p.seqused_q = p.seqused_kv = true, c.seqused_q = {67, 40}, c.seqused_kv = {60, 131}, p.causal = true;
  });
  add("q8_growing", e4m3, ScaleKind::head,
      [](Case& c, Problem& p) { c.draw = Draw::growing, p.seq_kv = 600, p.heads_q = p.heads_kv = 1; });
  add("q8_falling", e4m3, ScaleKind::head, [](Case& c, Problem& p) { c.draw = Draw::falling, p.causal = true; });
  add("q8_nan", e4m3, ScaleKind::none,
      [](Case& c, Problem& p) { c.nan_value = 80, c.nan_key = 120, p.causal = true, p.seq_q = 131; });
  add("q8_inf", e5m2, ScaleKind::head, [](Case& c, Problem& p) { c.nan_value = 70, p.causal = true, p.seq_q = 131; });
  add("q8_gaps", e4m3, ScaleKind::none, [](Case&, Problem& p) {
    p.batch = 2, p.q_strides = {67 * 192 + 16, 192, 96}, p.k_strides = {131 * 160, 160, 80},
    p.v_strides = {131 * 176, 176, 80};
  });
  add("q8_odd_strides", e4m3, ScaleKind::none, [](Case&, Problem& p) { p.q_strides = {67 * 136, 136, 68}; });
  add("q8_head_dim_24", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.head_dim = 24, p.head_dim_v = 40; });
  add("q8_wide", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.head_dim = 256, p.causal = true; });
  add("q8_one_query", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.seq_q = 1, p.heads_q = 8; });
  add("q8_alibi", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.alibi = true, p.causal = true, p.seq_q = 131; });
  add("q8_alibi_both_ways", e5m2, ScaleKind::none,
      [](Case&, Problem& p) { p.alibi = true, p.sink = true, p.head_dim = 128, p.seq_kv = 400; });
  add("q8_sink", e4m3, ScaleKind::head, [](Case& c, Problem& p) {  // rows that see no key, and a NaN in a value
    p.sink = true, p.causal = true, p.seq_q = 200, p.seq_kv = 131, c.nan_value = 60;
  });
  add("q8_sink_used", e4m3, ScaleKind::tensor, [](Case& c, Problem& p) {
    p.sink = true, p.batch = 2, p.seqused_q = p.seqused_kv = true, c.seqused_q = {67, 40}, c.seqused_kv = {60, 131};
  });
  add("q8_late", e4m3, ScaleKind::head, [](Case& c, Problem& p) {  // the largest scores come last, rows are long
    c.draw = Draw::peaked, p.seq_kv = 700, p.head_dim = 128, p.head_dim_v = 64, p.heads_q = p.heads_kv = 1;
  });
  add("q8_wide_values", e5m2, ScaleKind::head, [](Case& c, Problem& p) {
    p.head_dim = 32, p.head_dim_v = 256, c.nan_value = 80, p.causal = true, p.seq_q = 131;
  });
  add("q8_narrow_values", e4m3, ScaleKind::none, [](Case&, Problem& p) { p.head_dim = 208, p.head_dim_v = 16; });
  add("q8_bias", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.bias = over(p, true, true, true), p.causal = true, c.lowest_bias = true, p.head_dim = 80, p.head_dim_v = 48;
  });
  add("q8_mask", e5m2, ScaleKind::head, [](Case& c, Problem& p) {
    p.seq_q = 131, p.mask = over(p, true, true, true), p.softcap = 4, c.nan_value = 30, p.head_dim = 128;
  });
  add("q8_pages", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.batch = 3, p.heads_q = 4, put_in_pages(c, 7, {131, 60, 1}), p.causal = true, p.head_dim = 128;
  });
  add("q8_pages_16", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.batch = 3, p.heads_q = 4, put_in_pages(c, 16, {131, 60, 1}), p.causal = true, p.head_dim = 128, c.nan_value = 80;
  });
  add("q8_pages_packed", e5m2, ScaleKind::none, [](Case& c, Problem& p) {
    pack(c, {70, 0, 129, 5}, {0, 0, 0, 0}), p.seq_kv = 200, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 8, {70, 64, 200, 1}), p.head_dim_v = 48;
  });
  add("q8_bias_boxes", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.seq_q = 200, p.seq_kv = 328, p.head_dim = 128, p.bias = over(p, false, true, true), p.causal = true, c.lowest_bias = true;
  });
  add("q8_bias_cap", e4m3, ScaleKind::tensor, [](Case&, Problem& p) {
    p.head_dim = 256, p.softcap = 5, p.alibi = true, p.bias = over(p, true, true, true), p.window_left = 90;
  });
  add("q8_late_heads", e4m3, ScaleKind::none, [](Case& c, Problem& p) {  // V of the last heads is transposed under tiles
    p.heads_q = 24, p.heads_kv = 3, p.seq_q = p.seq_kv = 130, c.nan_value = 128, p.causal = true;
  });
  add("q8_left_padding", e4m3, ScaleKind::none, [](Case& c, Problem& p) {
    p.batch = 2, p.left_padding = p.alibi = true, c.left_padding = {70, 5}, p.window_left = 50, p.seq_q = 131;
  });
  add("q8_hidden_rows", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.seq_q = p.seq_kv = 300, p.head_dim = 128, c.document = 90, p.hidden_rows.bounds = 2, c.nan_value = 40;
    make_masks_dense(p);
  });
  add("q8_dropout", e4m3, ScaleKind::tensor,
      [](Case& c, Problem& p) { p.dropout_p = 0.3f, p.causal = true, c.nan_value = 60, p.seq_q = 131; });
  add("q8_no_keys", e4m3, ScaleKind::none, [](Case&, Problem& p) { p.seq_kv = 0; });
  return cases;
}

}  // namespace flash_attention::testing
