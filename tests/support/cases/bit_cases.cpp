#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {
namespace {

constexpr BitMask key_bits{.kind = BitMaskKind::keys, .offsets = true};

BitMask draft_bits(std::int64_t row_bytes, bool offsets = false) {
  return {.kind = BitMaskKind::drafts, .row_bytes = row_bytes, .offsets = offsets};
}

}  // namespace

std::vector<Case> bit_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("drafts", [](Case&, Problem& p) { p.seq_q = 7, p.bit_mask = draft_bits(1); });
  add("drafts_paged", [](Case& c, Problem& p) {
    p.seq_q = 13, p.heads_q = 8, p.head_dim = 128, put_in_pages(c, 16, {131, 13, 70, 5}), p.bit_mask = draft_bits(2);
  });
  add("drafts_nan_value", [](Case& c, Problem& p) {  // a draft that some see
    p.seq_q = 9, put_in_pages(c, 64, {131, 90}), p.bit_mask = draft_bits(4), c.nan_value = 127;
  });
  add("drafts_causal_growing", [](Case& c, Problem& p) {
    p.seq_q = 16, p.heads_q = 4, put_in_pages(c, 7, {131, 64}), p.causal = true, p.bit_mask = draft_bits(2);
    c.draw = Draw::growing;
  });
  add("drafts_of_a_prompt", [](Case&, Problem& p) { p.seq_q = 67, p.seq_kv = 263, p.bit_mask = draft_bits(9); });
  add("drafts_packed", [](Case& c, Problem& p) {
    pack(c, {8, 0, 1, 40}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.heads_q = 4, p.bit_mask = draft_bits(5);
  });
  add("drafts_some_sequences", [](Case& c, Problem& p) {  // mixed with prompts, which are causal
    pack(c, {8, 7, 1, 40}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.heads_q = 4, p.bit_mask = draft_bits(5, true), p.causal = true;
  });
  add("drafts_used", [](Case& c, Problem& p) {  // the tree is of the queries in use
    p.seq_q = 9, p.seqused_q = p.seqused_kv = true, c.seqused_q = {5, 9}, c.seqused_kv = {131, 7};
    p.bit_mask = draft_bits(3), p.window_left = 50, p.sink = true;
  });
  add("drafts_wide_values", [](Case& c, Problem& p) {
    p.seq_q = 5, p.heads_q = 16, p.head_dim = 192, p.head_dim_v = 128, put_in_pages(c, 32, {131, 40}), p.softcap = 3;
    p.bit_mask = draft_bits(1), p.alibi = true;
  });
  add("drafts_padded", [](Case& c, Problem& p) {
    p.seq_q = 4, p.left_padding = true, c.left_padding = {129, 5}, p.bit_mask = draft_bits(1), p.attention_chunk = 33;
  });
  add("bits", [](Case&, Problem& p) { p.seq_q = 5, p.bit_mask = key_bits; });
  add("bits_paged", [](Case& c, Problem& p) {
    p.seq_q = 13, p.heads_q = 8, p.head_dim = 128, put_in_pages(c, 16, {131, 13, 70, 5}), p.bit_mask = key_bits;
  });
  add("bits_prompt", [](Case& c, Problem& p) {
    p.seq_q = 131, p.seq_kv = 197, p.bit_mask = key_bits, p.causal = true, c.nan_value = 100;
  });
  add("bits_packed", [](Case& c, Problem& p) { pack(c, {65, 0, 129, 3}, {65, 7, 131, 40}), p.bit_mask = key_bits; });
  add("bits_packed_paged", [](Case& c, Problem& p) {
    pack(c, {40, 0, 1, 97}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 8, {60, 131, 17, 97}), p.heads_q = 4, p.bit_mask = key_bits, c.draw = Draw::spike;
  });
  add("bits_masked", [](Case&, Problem& p) {
    p.seq_q = 11, p.mask = over(p, true, true, true), p.bias = over(p, false, true, true), p.bit_mask = key_bits;
  });
  add("windows", [](Case& c, Problem& p) {
    p.batch = 4, p.sequence_windows = true, c.sequence_windows = {-1, -1, -1, 0, 20, 3, 0, -1};
  });
  add("windows_paged", [](Case& c, Problem& p) {
    p.seq_q = 3, p.heads_q = 8, put_in_pages(c, 16, {131, 97, 64, 2});
    p.sequence_windows = true, c.sequence_windows = {-1, -1, -1, 0, 31, 0, -5, 1};
  });
  add("windows_packed", [](Case& c, Problem& p) {
    pack(c, {65, 7, 129}, {65, 67, 131}), p.window_left = 90;
    p.sequence_windows = true, c.sequence_windows = {-1, 0, 2147483647, -1, 40, 2147483647};
  });
  add("windows_top_left", [](Case& c, Problem& p) {
    p.alignment = Alignment::top_left, p.sequence_windows = true, c.sequence_windows = {-1, 0, 12, 4}, p.sink = true;
  });
  add("windows_and_bits", [](Case& c, Problem& p) {  // each sequence has its own kind of mask
    pack(c, {40, 9, 1, 97}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.heads_q = 4, p.bit_mask = draft_bits(13, true), p.sequence_windows = true;
    c.sequence_windows = {-1, 0, -1, -1, 9, 0, 30, 0}, c.nan_value = 50;
  });
  return cases;
}

}  // namespace flash_attention::testing
