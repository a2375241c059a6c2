#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

std::vector<Case> group_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Dtype codes, std::int64_t group, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.problem.seq_q = 3, c.problem.head_dim = 64, c.problem.kv_dtype = codes, c.problem.kv_group = group;
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  constexpr Dtype nvfp4 = Dtype::nvfp4, mxfp4 = Dtype::mxfp4, int4 = Dtype::int4;
  add("nvfp4_plain", nvfp4, 0, [](Case& c, Problem& p) { p.head_dim = 128, c.draw = Draw::growing; });
  add("nvfp4_tensor_pages", nvfp4, 16, [](Case& c, Problem& p) {
    p.heads_q = 8, p.head_dim = 128, p.kv_scales = ScaleKind::tensor;
    put_in_pages(c, 16, {131, 33, 64});
  });
  add("mxfp4_plain", mxfp4, 0, [](Case&, Problem& p) { p.heads_q = 12, p.causal = true; });
  add("int4_plain", int4, 0, [](Case&, Problem& p) { p.head_dim = 128, p.heads_q = 8; });
  add("int4_64_pages", int4, 64, [](Case& c, Problem& p) {
    p.heads_q = 16, p.seq_q = 5, p.head_dim = 128, p.window_left = 60, p.causal = true;
    put_in_pages(c, 7, {131, 0, 1});
  });
  add("int4_128_sink", int4, 128, [](Case& c, Problem& p) {
    p.head_dim = 128, p.head_dim_v = 128, p.sink = true, p.softcap = 5, c.draw = Draw::peaked;
  });
  add("mxfp4_wide", mxfp4, 32, [](Case&, Problem& p) { p.head_dim = 192, p.head_dim_v = 128, p.heads_q = 4; });
  add("nvfp4_lengths", nvfp4, 0, [](Case& c, Problem& p) {
    p.alibi = p.left_padding = p.seqused_kv = true, c.left_padding = {70, 5}, c.seqused_kv = {131, 90};
  });
  add("nvfp4_window_nan", nvfp4, 0, [](Case& c, Problem& p) {  // NaN in keys that no query sees
    p.seq_q = 1, p.heads_q = 4, p.head_dim = 128, p.causal = true, p.window_left = 60, c.nan_value = 69, c.nan_key = 68;
  });
  add("int4_window_pages", int4, 32, [](Case& c, Problem& p) {
    p.seq_q = 1, p.heads_q = 8, p.causal = true, p.window_left = 33, put_in_pages(c, 16, {131, 97}), c.nan_value = 90;
  });
  add("nvfp4_nan", nvfp4, 0, [](Case& c, Problem& p) {
    p.seq_q = 7, p.mask = over(p, true, true, true), p.kv_scales = ScaleKind::tensor, c.nan_value = 30, c.nan_key = 101;
  });
  add("mxfp4_nan_pages", mxfp4, 0, [](Case& c, Problem& p) {
    p.seq_q = 7, p.causal = true, put_in_pages(c, 64, {131, 90}), c.nan_value = 126;
  });
  add("int4_nan", int4, 0, [](Case& c, Problem& p) { p.seq_q = 7, p.causal = true, c.nan_value = 126, c.nan_key = 127; });
  add("mxfp4_packed", mxfp4, 0, [](Case& c, Problem& p) {
    pack(c, {4, 0, 2}, {65, 7, 131}), p.heads_q = 4, p.causal = true;
  });
  add("nvfp4_head_dims", nvfp4, 0, [](Case&, Problem& p) { p.head_dim = 48, p.head_dim_v = 80; });
  add("int4_long_queries", int4, 32, [](Case&, Problem& p) { p.seq_q = 67, p.causal = true, p.head_dim = 96; });
  add("nvfp4_gaps", nvfp4, 0, [](Case&, Problem& p) {
    p.k_strides = {131 * 160 + 16, 160, 80}, p.v_strides = {131 * 176, 176, 80};
    p.k_group_strides = {2000, 13, 6}, p.v_group_strides = {1100, 4, 540};
  });
  return cases;
}

}  // namespace flash_attention::testing
