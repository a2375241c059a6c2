#include <cmath>

#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {

std::vector<Case> narrow_key_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Dtype codes, ScaleKind scales, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.problem.seq_q = 3, c.problem.kv_dtype = codes, c.problem.kv_scales = scales;
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  constexpr Dtype e4m3 = Dtype::float8_e4m3, e5m2 = Dtype::float8_e5m2, int8 = Dtype::int8;
  add("e4m3_plain", e4m3, ScaleKind::none, [](Case&, Problem&) {});
  add("e5m2_plain", e5m2, ScaleKind::none, [](Case&, Problem& p) { p.head_dim = 80, p.head_dim_v = 48; });
  add("int8_plain", int8, ScaleKind::none, [](Case&, Problem& p) { p.scale = 0.02f; });
  add("e4m3_tensor", e4m3, ScaleKind::tensor, [](Case&, Problem& p) { p.heads_q = 8, p.head_dim = 128, p.causal = true; });
  add("e5m2_tensor", e5m2, ScaleKind::tensor, [](Case& c, Problem& p) { p.seq_q = 1, put_in_pages(c, 16, {131, 0, 70}); });
  add("int8_tensor", int8, ScaleKind::tensor, [](Case& c, Problem& p) { p.sink = true, c.draw = Draw::peaked; });
  add("e4m3_head", e4m3, ScaleKind::head, [](Case& c, Problem& p) {
    p.heads_q = 12, put_in_pages(c, 7, {131, 60, 1}), p.causal = true, p.softcap = 5;
  });
  add("e5m2_head", e5m2, ScaleKind::head, [](Case& c, Problem& p) {
    p.alibi = p.left_padding = p.seqused_kv = true, c.left_padding = {70, 5}, c.seqused_kv = {131, 90};
  });
  add("int8_head", int8, ScaleKind::head, [](Case&, Problem& p) {
    p.heads_q = 8, p.seq_q = 5, p.window_left = 60, p.causal = true, p.head_dim = 32, p.head_dim_v = 96;
  });
  add("e4m3_token", e4m3, ScaleKind::token, [](Case& c, Problem& p) {
    p.heads_q = 8, p.head_dim = 128, put_in_pages(c, 16, {131, 33, 64}), p.causal = true;
  });
  add("e5m2_token", e5m2, ScaleKind::token, [](Case&, Problem& p) { p.bias = over(p, true, true, true), p.softcap = 8; });
  add("int8_token", int8, ScaleKind::token, [](Case& c, Problem& p) {
    p.heads_q = 16, p.seq_q = 9, p.mask = over(p, true, true, true), p.key_lengths = true, c.key_lengths = {131, 77};
  });
  add("e4m3_nan", e4m3, ScaleKind::head,
      [](Case& c, Problem& p) { p.seq_q = 7, p.mask = over(p, true, true, true), c.nan_value = 30, c.nan_key = 101; });
  add("e5m2_nan_token", e5m2, ScaleKind::token,
      [](Case& c, Problem& p) { p.seq_q = 7, p.causal = true, c.nan_value = 126; });
  add("int8_packed_token", int8, ScaleKind::token, [](Case& c, Problem& p) {
    pack(c, {4, 0, 2}, {65, 7, 131}), p.heads_q = 4, p.causal = true;
  });
  add("e4m3_long_queries", e4m3, ScaleKind::token, [](Case&, Problem& p) { p.seq_q = 67, p.causal = true; });
  add("e4m3_gaps", e4m3, ScaleKind::token, [](Case&, Problem& p) {
    p.k_strides = {131 * 160 + 16, 160, 80}, p.v_strides = {131 * 176, 176, 80};
    p.k_scale_strides = {1000, 3, 2}, p.v_scale_strides = {300, 1, 150};
  });
  add("e4m3_head_dim_24", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.head_dim = 24, p.head_dim_v = 40; });
  add("e4m3_wide", e4m3, ScaleKind::head, [](Case&, Problem& p) { p.head_dim = 256, p.head_dim_v = 208, p.heads_q = 4; });
  return cases;
}

void check_narrow_bits(Case c, const Target& target) {
  c.power_scales = true;
  if (c.nan_key >= 0 || c.nan_value >= 0) GTEST_SKIP() << "a NaN may have any bits";
  if (const std::string reason = rejection(c, target); !reason.empty()) GTEST_SKIP() << reason;
  Expected expected = expect(c, false);
  const Results narrow = attempt(c, target, expected).results;
  Case wide = c;
  wide.problem.kv_dtype.reset();
  wide.problem.kv_scales = ScaleKind::none;
  wide.problem.k_scale_strides = wide.problem.v_scale_strides = Strides{};
  expected.inputs.k_codes.clear(), expected.inputs.v_codes.clear();
  for (std::vector<double>* values : {&expected.inputs.k, &expected.inputs.v}) {  // int8 has no NaN: nothing asks for care
    for (double& x : *values) x = c.problem.kv_dtype == Dtype::int8 && !std::isfinite(x) ? 1 : x;
  }
  if (const std::string reason = rejection(wide, target); !reason.empty()) GTEST_SKIP() << reason;
  EXPECT_EQ(first_changed(narrow, attempt(wide, target, expected).results), "");
}

}  // namespace flash_attention::testing
