#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

std::vector<Case> cache_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("paged", [](Case& c, Problem&) { put_in_pages(c, 16, {131, 0, 70}); });
  add("paged_causal", [](Case& c, Problem& p) { put_in_pages(c, 64, {67, 131}), p.causal = true; });
  add("paged_by_one", [](Case& c, Problem& p) { p.seq_q = 3, put_in_pages(c, 1, {33, 131}), p.causal = true; });
  add("paged_by_seven", [](Case& c, Problem& p) {
    p.seq_q = 1, p.heads_q = 8, p.head_dim = 128, put_in_pages(c, 7, {1, 131, 64, 63}), p.sink = true;
  });
  add("paged_heads_first", [](Case& c, Problem& p) {
    p.seq_q = 2, p.heads_q = 12, put_in_pages(c, 32, {131, 97}), p.window_left = 40, p.causal = true;
    p.k_strides = p.v_strides = {2 * 32 * 64, 64, 32 * 64};
  });
  add("paged_gaps", [](Case& c, Problem& p) {
    p.seq_q = 5, p.heads_q = 4, put_in_pages(c, 48, {131, 40}), p.softcap = 3, p.alibi = true;
    p.k_strides = {48 * 160 + 24, 160, 72}, p.v_strides = {48 * 176 + 8, 176, 80};
  });
  add("paged_packed_queries", [](Case& c, Problem& p) {
    pack(c, {40, 0, 1, 97}, {0, 0, 0, 0}), p.seq_kv = 131, p.total_kv = 0, c.cu_seqlens_kv.clear();
    put_in_pages(c, 16, {60, 131, 17, 97}), p.heads_q = 4, p.causal = true;
  });
  add("paged_no_keys", [](Case& c, Problem& p) {  // there are pages, and no score
    p.seq_q = 2, p.seq_kv = 0, p.mask = p.bias = over(p, true, true, true), put_in_pages(c, 4, {0, 0});
  });
  add("one_page_a_sequence", [](Case& c, Problem& p) {  // which row of a cache a sequence uses
    p.seq_q = 1, put_in_pages(c, 131, {131, 3, 90}), p.key_lengths = true, c.key_lengths = {131, 3, 80};
  });
  add("left_padding", [](Case& c, Problem& p) {
    p.seq_q = 4, p.left_padding = p.seqused_kv = true, c.left_padding = {70, 5}, c.seqused_kv = {131, 90}, p.causal = true;
  });
  add("left_padding_chunk", [](Case& c, Problem& p) {  // chunks are counted from the first key
    p.left_padding = p.seqused_kv = true, c.left_padding = {31, 5}, c.seqused_kv = {131, 40}, p.attention_chunk = 33;
  });
  add("left_padding_window", [](Case& c, Problem& p) {
    p.left_padding = true, c.left_padding = {131, 64}, p.window_left = 20, p.window_right = 3;
  });
  add("left_padding_paged", [](Case& c, Problem& p) {
    p.seq_q = 2, put_in_pages(c, 16, {131, 33}), p.left_padding = true, c.left_padding = {65, 33}, p.alibi = true;
  });
  add("left_padding_one_chunk", [](Case& c, Problem& p) {  // a query before the first key is in a chunk without keys
    p.seq_q = p.seq_kv = 49, p.left_padding = true, c.left_padding = {40, 5}, p.attention_chunk = 64;
  });
  return cases;
}

}  // namespace flash_attention::testing
