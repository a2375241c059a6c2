#include "support/cases/contract.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

/// Hidden rows over the named axes.
HiddenRows hide(Problem& p, int bounds, bool batch = false, bool head = false) {
  Problem dense = p;
  dense.hidden_rows = {.bounds = bounds, .batch_stride = batch, .head_stride = head};
  make_masks_dense(dense);
  return dense.hidden_rows;
}

BlockMask in_blocks(Problem& p, std::int64_t block_q, std::int64_t block_kv, bool batch, bool head) {
  Problem dense = p;
  dense.block_mask = {.block_q = block_q, .block_kv = block_kv, .batch_stride = batch, .head_stride = head};
  make_masks_dense(dense);
  return dense.block_mask;
}

}  // namespace

std::vector<Case> mask_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("hidden_from", [](Case&, Problem& p) { p.hidden_rows = hide(p, 1); });
  add("hidden_between", [](Case&, Problem& p) { p.hidden_rows = hide(p, 2, true); });
  add("hidden_twice", [](Case&, Problem& p) { p.hidden_rows = hide(p, 4, true, true); });
  add("hidden_causal", [](Case&, Problem& p) { p.hidden_rows = hide(p, 2, false, true), p.causal = true; });
  add("documents_causal", [](Case& c, Problem& p) {
    p.batch = 1, p.seq_q = p.seq_kv = 389, c.document = 97, p.hidden_rows = hide(p, 1), p.causal = true;
  });
  add("documents_full", [](Case& c, Problem& p) {
    p.batch = 1, p.seq_q = p.seq_kv = 389, c.document = 131, p.hidden_rows = hide(p, 4, false, true), c.dlse = true;
  });
  add("documents_short", [](Case& c, Problem& p) { c.document = 5, p.hidden_rows = hide(p, 4), c.nan_value = 61; });
  add("documents_gqa", [](Case& c, Problem& p) {
    p.batch = 1, p.heads_q = 6, p.seq_q = 131, p.seq_kv = 263, c.document = 64, p.hidden_rows = hide(p, 2, false, true);
    p.causal = true;
  });
  add("hidden_packed", [](Case& c, Problem& p) {
    pack(c, {65, 0, 31, 129}, {65, 7, 80, 129}), c.document = 40, p.hidden_rows = hide(p, 4, false, true);
  });
  add("hidden_packed_causal", [](Case& c, Problem& p) {
    pack(c, {40, 97, 1}, {64, 97, 131}), p.heads_q = 4, p.hidden_rows = hide(p, 2), p.causal = true;
  });
  add("hidden_window_sink", [](Case& c, Problem& p) {
    p.hidden_rows = hide(p, 2, true), p.window_left = 40, p.window_right = 9, p.sink = c.dsink = true, c.dlse = true;
  });
  add("hidden_dropout", [](Case& c, Problem& p) {
    p.seq_q = 131, c.document = 50, p.hidden_rows = hide(p, 4), p.dropout_p = 0.3f, p.head_dim_v = 32;
  });
  add("hidden_everything", [](Case& c, Problem& p) {
    p.heads_q = 4, p.head_dim = 40, p.softcap = 4, p.alibi = true, p.sink = c.dsink = true, p.window_left = 90;
    p.bias = over(p, false, true, true), c.dbias = true, p.mask = over(p, true, false, true);
    p.hidden_rows = hide(p, 2, true, true), p.block_mask = in_blocks(p, 32, 16, true, false);
    p.key_lengths = true, c.key_lengths = {120, 131}, p.deterministic = true, c.dlse = true;
  });
  add("hidden_nan_key",
      [](Case& c, Problem& p) { p.seq_q = p.seq_kv = 193, c.document = 61, p.hidden_rows = hide(p, 4), c.nan_key = 70; });
  add("hidden_nan_query",
      [](Case& c, Problem& p) { p.seq_q = p.seq_kv = 193, c.document = 61, p.hidden_rows = hide(p, 4), c.nan_query = 70; });
  add("hidden_no_key", [](Case&, Problem& p) { p.hidden_rows = hide(p, 2), p.seq_kv = 0; });
  add("mask_documents", [](Case& c, Problem& p) {
    p.batch = 1, p.seq_q = p.seq_kv = 389, c.document = 97, p.mask = over(p, false, false, true), p.causal = true;
  });
  add("mask_documents_aligned", [](Case& c, Problem& p) {
    p.batch = 1, p.seq_q = 320, p.seq_kv = 512, c.document = 192, p.mask = over(p, false, true, true), c.dlse = true;
  });
  add("mask_documents_wide", [](Case& c, Problem& p) {  // tiles that are hidden as a whole, in kernels that visit all
    p.batch = 1, p.seq_q = p.seq_kv = 320, p.head_dim = 192, c.document = 97, p.mask = over(p, false, false, true);
  });
  add("mask_documents_packed", [](Case& c, Problem& p) {
    pack(c, {65, 0, 129}, {65, 7, 131}), c.document = 64, p.mask = over(p, true, false, true);
  });
  add("blocks", [](Case&, Problem& p) { p.seq_q = 131, p.block_mask = in_blocks(p, 64, 64, true, true); });
  add("blocks_causal", [](Case&, Problem& p) {
    p.batch = 1, p.seq_q = p.seq_kv = 389, p.block_mask = in_blocks(p, 128, 128, false, false), p.causal = true;
  });
  add("blocks_small", [](Case&, Problem& p) { p.block_mask = in_blocks(p, 7, 5, false, true); });
  add("blocks_gqa", [](Case& c, Problem& p) {
    p.batch = 1, p.heads_q = 4, p.seq_q = 131, p.seq_kv = 521, p.block_mask = in_blocks(p, 32, 128, false, true);
    c.dlse = true;
  });
  add("blocks_packed", [](Case& c, Problem& p) {
    pack(c, {65, 0, 129}, {65, 7, 131}), p.block_mask = in_blocks(p, 16, 64, true, false), p.causal = true;
  });
  // Heads that share their keys skip different tiles.
  add("blocks_by_heads", [](Case&, Problem& p) {
    p.batch = 1, p.heads_q = 6, p.heads_kv = 2, p.seq_q = 263, p.block_mask = in_blocks(p, 64, 64, false, true);
  });
  return cases;
}

}  // namespace flash_attention::testing
