#include "support/cases/contract.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

KeyList of_keys(std::int64_t entries, std::int64_t heads = 1, bool counts = false) {
  return {.kind = KeyListKind::keys, .entries = entries, .heads = heads, .counts = counts};
}

KeyList of_blocks(std::int64_t entries, std::int64_t block_q, std::int64_t block_kv, std::int64_t heads = 1,
                  bool counts = false) {
  return {.kind = KeyListKind::blocks,
          .entries = entries,
          .heads = heads,
          .block_q = block_q,
          .block_kv = block_kv,
          .counts = counts};
}

}  // namespace

std::vector<Case> list_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("keys", [](Case&, Problem& p) { p.key_list = of_keys(40); });
  add("keys_counts", [](Case& c, Problem& p) { p.key_list = of_keys(65, 2, true), c.dlse = true; });
  add("keys_one", [](Case&, Problem& p) { p.key_list = of_keys(1); });
  add("keys_none", [](Case&, Problem& p) { p.key_list = of_keys(0); });
  add("keys_more_than_there_are", [](Case&, Problem& p) { p.seq_kv = 37, p.key_list = of_keys(120); });
  add("keys_no_key", [](Case&, Problem& p) { p.seq_kv = 0, p.key_list = of_keys(5, 1, true); });
  add("keys_group", [](Case& c, Problem& p) {
    p.heads_q = 12, p.heads_kv = 2, p.head_dim = 40, p.head_dim_v = 72, p.key_list = of_keys(63, 2), c.dlse = true;
  });
  add("keys_many_heads", [](Case&, Problem& p) { p.batch = 1, p.heads_q = 70, p.heads_kv = 1, p.key_list = of_keys(90); });
  add("keys_causal", [](Case&, Problem& p) { p.key_list = of_keys(70), p.causal = true; });
  add("keys_late_maximum", [](Case& c, Problem& p) { p.key_list = of_keys(127), c.draw = Draw::growing; });
  add("keys_large", [](Case& c, Problem& p) { p.key_list = of_keys(66, 1, true), c.draw = Draw::large; });
  add("keys_window_sink", [](Case& c, Problem& p) {
    p.key_list = of_keys(90), p.window_left = 60, p.window_right = 20, p.sink = c.dsink = true, c.dlse = true;
  });
  add("keys_dropout", [](Case&, Problem& p) { p.key_list = of_keys(70, 2), p.dropout_p = 0.3f, p.head_dim_v = 32; });
  add("keys_everything", [](Case& c, Problem& p) {
    p.heads_q = 4, p.head_dim = 40, p.softcap = 4, p.alibi = true, p.sink = c.dsink = true, p.window_left = 100;
    p.bias = over(p, false, true, true), p.mask = over(p, true, false, true), p.key_list = of_keys(100, 2, true);
    p.key_lengths = true, c.key_lengths = {120, 131}, p.deterministic = true, c.dlse = true;
  });
  add("keys_packed", [](Case& c, Problem& p) { pack(c, {65, 0, 31, 129}, {65, 7, 80, 129}), p.key_list = of_keys(50, 2); });
  add("keys_packed_causal", [](Case& c, Problem& p) {
    pack(c, {40, 97, 1}, {64, 97, 131}), p.heads_q = 4, p.key_list = of_keys(64, 1, true), p.causal = true;
  });
  add("keys_used", [](Case& c, Problem& p) {
    p.seqused_q = p.seqused_kv = true, c.seqused_q = {50, 67}, c.seqused_kv = {131, 90}, p.key_list = of_keys(80);
    p.causal = true;
  });
  add("keys_nan_key", [](Case& c, Problem& p) { p.key_list = of_keys(30), c.nan_key = 70; });
  add("keys_nan_value", [](Case& c, Problem& p) { p.key_list = of_keys(30), c.nan_value = 70, p.causal = true; });
  add("keys_nan_query", [](Case& c, Problem& p) { p.key_list = of_keys(30), c.nan_query = 31; });
  add("keys_wide", [](Case&, Problem& p) {
    p.batch = 1, p.heads_q = 8, p.heads_kv = 1, p.seq_q = 9, p.head_dim = 576, p.head_dim_v = 512, p.key_list = of_keys(100);
  });
  add("blocks", [](Case&, Problem& p) { p.seq_q = 131, p.key_list = of_blocks(3, 64, 32, 2); });
  add("blocks_of_queries", [](Case& c, Problem& p) {
    p.batch = 1, p.heads_q = 6, p.heads_kv = 2, p.seq_q = 197, p.seq_kv = 389, p.key_list = of_blocks(4, 64, 64, 6);
    c.dlse = true;
  });
  add("blocks_per_query", [](Case& c, Problem& p) {
    p.batch = 1, p.heads_q = 16, p.heads_kv = 1, p.seq_q = 37, p.seq_kv = 521, p.key_list = of_blocks(5, 1, 128);
    p.causal = true, p.sink = c.dsink = true;
  });
  add("blocks_odd", [](Case&, Problem& p) { p.key_list = of_blocks(9, 7, 5, 1, true); });
  add("blocks_larger_than_all", [](Case&, Problem& p) { p.key_list = of_blocks(2, 1000, 1000); });
  add("blocks_group_by_heads", [](Case&, Problem& p) {
    p.heads_q = 6, p.heads_kv = 2, p.head_dim_v = 40, p.key_list = of_blocks(6, 16, 16, 6, true), p.causal = true;
  });
  add("blocks_packed", [](Case& c, Problem& p) { pack(c, {65, 0, 129}, {65, 7, 131}), p.key_list = of_blocks(4, 1, 16, 2); });
  add("blocks_nan_value", [](Case& c, Problem& p) { p.key_list = of_blocks(3, 16, 16), c.nan_value = 70; });
  add("blocks_dropout", [](Case&, Problem& p) { p.key_list = of_blocks(5, 3, 20), p.dropout_p = 0.4f, p.softcap = 3; });
  return cases;
}

std::vector<Case> list_cache_cases(Dtype dtype) {
  std::vector<Case> cases;
  int number = 0;
  for (const auto& all : {cache_cases(dtype), latent_cases(dtype)}) {
    for (Case c : all) {
      Problem& p = c.problem;
      if (p.bit_mask.kind != BitMaskKind::none || p.sequence_windows) continue;
      if (p.kv_dtype || p.invariant || p.hidden_rows.bounds != 0 || p.block_mask.block_q != 0 || !p.program.empty())
        continue;
      c.name += "_listed";
      const std::int64_t heads = ++number % 2 == 0 ? 1 : p.heads_kv;
      p.key_list = number % 3 != 0 || p.packed ? of_keys(90, heads, number % 4 == 0) : of_blocks(5, 3, 20, heads);
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

}  // namespace flash_attention::testing
