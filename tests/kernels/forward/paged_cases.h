#pragma once

#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

/// Prompts whose K and V lie in pages: prime lengths, garbage in the table and in the pages past them, every option that
/// has something to do with where keys are. Pages that divide a tile of keys, that tiles divide, and that do neither.
inline std::vector<Case> paged_prompts(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t page_size, std::vector<std::int32_t> lengths, auto change) {
    Case c = base(name, dtype);
    Problem& p = c.problem;
    p.seq_q = 151, p.seq_kv = 401, p.heads_kv = 1, p.heads_q = 2;
    change(c, p);
    put_in_pages(c, page_size, std::move(lengths));
    cases.push_back(std::move(c));
  };
  const auto set = [](Problem& p, std::int64_t seq_q, std::int64_t seq_kv, std::int64_t dim) {
    p.seq_q = seq_q, p.seq_kv = seq_kv, p.head_dim = dim;
  };
  add("of_16", 16, {401, 0, 67}, [](Case&, Problem& p) { p.causal = true; });
  add("of_64", 64, {389, 131}, [](Case&, Problem& p) { p.head_dim = 128, p.causal = true; });
  add("of_256", 256, {401, 257}, [](Case&, Problem& p) { p.head_dim = 80, p.head_dim_v = 72; });
  add("of_24", 24, {337, 1}, [](Case&, Problem& p) { p.head_dim = 128, p.softcap = 5, p.sink = true; });
  add("of_8", 8, {199, 200}, [&](Case&, Problem& p) { set(p, 70, 211, 128), p.causal = true; });
  add("heads_first", 32, {401, 97}, [](Case&, Problem& p) {
    p.heads_kv = 2, p.heads_q = 4, p.window_left = 40, p.causal = true;
    p.k_strides = p.v_strides = {2 * 32 * 64, 64, 32 * 64};
  });
  add("gaps_alibi", 48, {131, 401}, [](Case&, Problem& p) {
    p.alibi = p.causal = true;
    p.k_strides = {48 * 160 + 24, 160, 72}, p.v_strides = {48 * 176 + 8, 176, 80};
  });
  add("packed_queries", 16, {60, 131, 17, 401}, [](Case& c, Problem& p) {
    pack(c, {40, 0, 1, 149}, {0, 0, 0, 0}), p.seq_kv = 401, p.total_kv = 0, c.cu_seqlens_kv.clear();
    p.causal = true;
  });
  add("chunk_window", 16, {401, 180}, [](Case&, Problem& p) { p.causal = true, p.window_left = 63, p.head_dim = 128; });
  add("key_lengths", 64, {401, 300}, [](Case& c, Problem& p) { p.key_lengths = true, c.key_lengths = {399, 129}; });
  add("left_padding", 16, {401, 211}, [](Case& c, Problem& p) {
    p.left_padding = p.causal = true, c.left_padding = {130, 211}, p.sink = true;
  });
  add("left_padding_window", 64, {401, 300}, [](Case& c, Problem& p) {
    p.left_padding = true, c.left_padding = {61, 290}, p.window_left = 100, p.window_right = 7;
  });
  add("nan_value", 32, {401, 217}, [](Case& c, Problem& p) { p.causal = true, c.nan_value = 200; });
  add("wide", 16, {151, 90}, [&](Case&, Problem& p) { set(p, 67, 151, 256), p.causal = true; });
  return cases;
}

/// Pages that only a copy of each row can take.
inline std::vector<Case> odd_pages(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t page_size, auto change) {
    Case c = base(name, dtype);
    c.problem.causal = true, c.problem.heads_q = 4;
    change(c.problem);
    put_in_pages(c, page_size, {131, 127, 0});
    cases.push_back(std::move(c));
  };
  add("of_1", 1, [](Problem&) {});
  add("of_7", 7, [](Problem& p) { p.head_dim = 128; });
  add("of_131", 131, [](Problem& p) { p.head_dim = 72, p.window_left = 30; });
  add("of_3_few_queries", 3, [](Problem& p) { p.seq_q = 30, p.bias = over(p, false, true, true); });
  return cases;
}

}  // namespace flash_attention::testing
