#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

std::vector<Case> latent_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.problem.latent = true, c.problem.head_dim = 96, c.problem.head_dim_v = 64;
    c.problem.seq_q = 2, c.problem.heads_q = 4, c.problem.heads_kv = 1;
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("latent_plain", [](Case&, Problem&) {});
  add("latent_deepseek", [](Case& c, Problem& p) {
    p.head_dim = 576, p.head_dim_v = 512, p.heads_q = 16, p.seq_q = 1, p.scale = 0.1f;
    put_in_pages(c, 64, {131, 0, 70});
  });
  add("latent_two_tokens", [](Case& c, Problem& p) {
    p.head_dim = 576, p.head_dim_v = 512, p.heads_q = 24, p.causal = true, put_in_pages(c, 16, {131, 1, 97});
  });
  add("latent_in_one_cache", [](Case& c, Problem& p) {  // 24 columns, then 40 of the key alone, then a gap
    p.head_dim = 64, p.head_dim_v = 24, p.seq_q = 4, p.causal = true, put_in_pages(c, 7, {131, 60});
    p.k_strides = p.v_strides = {7 * 72, 72, 72};
  });
  add("latent_values_alone", [](Case& c, Problem& p) {  // the whole key is the value
    p.head_dim = 64, p.seq_q = 3, p.causal = true, put_in_pages(c, 16, {131, 60});
  });
  add("latent_many_queries", [](Case& c, Problem& p) {
    p.seq_q = 67, p.causal = true, p.heads_q = 4, p.heads_kv = 2, put_in_pages(c, 32, {131, 90});
  });
  add("latent_growing", [](Case& c, Problem& p) { c.draw = Draw::growing, p.causal = true, p.heads_q = 16; });
  add("latent_spike", [](Case& c, Problem& p) {
    c.draw = Draw::spike, p.head_dim = 576, p.head_dim_v = 512, p.seq_kv = 259, p.heads_q = 8, p.batch = 1;
  });
  add("latent_nan_value", [](Case& c, Problem& p) { c.nan_value = 130, p.causal = true, p.heads_q = 20; });
  add("latent_nan_key", [](Case& c, Problem& p) { c.nan_key = 130, p.causal = true, put_in_pages(c, 16, {131, 131}); });
  add("latent_options",
      [](Case&, Problem& p) { p.softcap = 4, p.sink = p.alibi = true, p.window_left = 60, p.causal = true, p.seq_q = 5; });
  add("latent_packed_queries", [](Case& c, Problem& p) {
    pack(c, {3, 0, 1, 9}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.causal = true;
  });
  add("latent_drafts", [](Case& c, Problem& p) {
    p.head_dim = 576, p.head_dim_v = 512, p.seq_q = 5, p.heads_q = 16, put_in_pages(c, 64, {131, 40});
    p.bit_mask = {.kind = BitMaskKind::drafts, .row_bytes = 1}, c.nan_value = 128;
  });
  add("latent_drafts_packed", [](Case& c, Problem& p) {
    pack(c, {3, 0, 1, 9}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.bit_mask = {.kind = BitMaskKind::drafts, .row_bytes = 2, .offsets = true};
    p.sequence_windows = true, c.sequence_windows = {-1, 0, 3, 3, -1, -1, 30, 0};
  });
  add("latent_left_padding", [](Case& c, Problem& p) {
    p.left_padding = p.seqused_kv = true, c.left_padding = {70, 5}, c.seqused_kv = {131, 90}, p.causal = true;
  });
  add("latent_e4m3", [](Case& c, Problem& p) {
    p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::tensor, p.head_dim = 576, p.head_dim_v = 512;
    p.heads_q = 16, p.causal = true, put_in_pages(c, 64, {131, 40});
  });
  add("latent_e4m3_head", [](Case&, Problem& p) {
    p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head, p.causal = true, p.softcap = 9;
  });
  add("latent_int8_token", [](Case& c, Problem& p) {
    p.kv_dtype = Dtype::int8, p.kv_scales = ScaleKind::token, p.causal = true, put_in_pages(c, 16, {131, 33});
  });
  return cases;
}

}  // namespace flash_attention::testing
