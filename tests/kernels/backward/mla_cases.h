#pragma once

#include "support/cases/make_case.h"

namespace flash_attention::testing {

/// What backward/mla_sm90 has edges of: values in the memory of the keys or apart, rows of one tile and of two, lists that
/// end within a tile.
inline std::vector<Case> mla_backward_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t entries, void (*change)(Case&, Problem&)) {
    Case c = base(name, Dtype::bfloat16);
    Problem& p = c.problem;
    p.batch = 1, p.heads_q = 64, p.heads_kv = 1, p.seq_q = 3, p.seq_kv = 101, p.head_dim = 576, p.head_dim_v = 512;
    p.key_list = {.kind = KeyListKind::keys, .entries = entries};
    change(c, p);
    if (c.values_begin_keys) {
      p.k_strides = p.v_strides = {p.seq_kv * p.heads_kv * p.head_dim, p.heads_kv * p.head_dim, p.head_dim};
    }
    cases.push_back(std::move(c));
  };
  add("mla_backward", 80, [](Case&, Problem&) {});
  add("mla_backward_one_tensor", 150, [](Case& c, Problem&) { c.values_begin_keys = true; });
  add("mla_backward_two_tiles_of_rows", 65, [](Case& c, Problem& p) {
    c.values_begin_keys = true, c.draw = Draw::growing, p.heads_q = 70, p.seq_q = 2, p.batch = 2;
  });
  add("mla_backward_few_heads", 40, [](Case& c, Problem& p) {
    p.heads_q = 12, p.heads_kv = 2, p.key_list.heads = 2, p.key_list.counts = true, c.values_begin_keys = true;
  });
  add("mla_backward_sink", 70, [](Case& c, Problem& p) {
    p.sink = c.dsink = true, p.dtype = Dtype::float16, c.values_begin_keys = true;
  });
  add("mla_backward_lengths", 64, [](Case& c, Problem& p) {
    p.seqused_kv = true, p.batch = 2, c.seqused_kv = {0, 57}, c.draw = Draw::large, c.values_begin_keys = true;
  });
  add("mla_backward_narrow", 33, [](Case& c, Problem& p) { p.head_dim = 520, c.values_begin_keys = true; });
  add("mla_backward_values_alone", 129, [](Case& c, Problem& p) { p.head_dim = 512, c.values_begin_keys = true; });
  add("mla_backward_nan", 20, [](Case& c, Problem&) { c.nan_key = 70, c.nan_value = 70; });
  return cases;
}

}  // namespace flash_attention::testing
