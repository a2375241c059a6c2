#pragma once

#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"

namespace flash_attention::testing {

/// The contract's cases with as few queries as the kernel takes.
inline std::vector<Case> few_queries(Dtype dtype) {
  std::vector<Case> cases;
  for (Case c : contract_cases(dtype)) {
    Problem& p = c.problem;
    const bool own_strides = !(p.q_strides == Strides{}) || p.bias.present || p.mask.present;
    if (!p.packed && !p.seqused_q && !own_strides && p.seq_q > 5) p.seq_q = 5;
    cases.push_back(c);
  }
  return cases;
}

/// Whole items, as many for each block of 2 or 3 SMs, which are far apart; runs so long that two groups of warps take the
/// tiles in turn.
inline std::vector<Case> long_and_many() {
  Case many = base("whole_items_apart", Dtype::bfloat16);
  many.problem.batch = 12, many.problem.seq_q = 1, many.problem.seq_kv = 450, many.problem.heads_q = 6;
  Case turns = base("two_long_runs", Dtype::bfloat16);
  turns.problem.batch = turns.problem.seq_q = turns.problem.heads_kv = 1, turns.problem.heads_q = 3;
  turns.problem.seq_kv = 16500, turns.problem.seqused_kv = true, turns.seqused_kv = {16390};
  turns.problem.head_dim = turns.problem.head_dim_v = 72;
  return {many, turns};
}

/// Groups and numbers of query tokens that fill tiles of 8, 16, 32 and 64 rows, and miss them; lengths at the edges of
/// tiles and very uneven ones; pages of every kind.
inline std::vector<Case> decode_shapes() {
  struct Rows {
    std::int64_t group, seq_q;
  };
  std::vector<Case> cases;
  for (const auto [group, seq_q] :
       {Rows{1, 1}, {2, 16}, {4, 1}, {4, 2}, {6, 1}, {7, 3}, {8, 5}, {12, 1}, {16, 1}, {16, 9}, {24, 1}, {24, 3}}) {
    Case c = base("", Dtype::bfloat16);
    c.name = "group_" + std::to_string(group) + "_by_" + std::to_string(seq_q);
    c.problem.heads_kv = 2, c.problem.heads_q = 2 * group, c.problem.seq_q = seq_q, c.problem.causal = true;
    const std::int64_t page_sizes[] = {1, 7, 16, 64};
    put_in_pages(c, page_sizes[cases.size() % 4], {127, 1, 64, 129});
    cases.push_back(c);
  }
  Case uneven = base("uneven", Dtype::bfloat16);
  uneven.problem.seq_kv = 1500, uneven.problem.seq_q = 1, uneven.problem.heads_q = 8;
  put_in_pages(uneven, 16, {1,  1499, 0,  63, 700, 1,  65, 0,  0,  128, 2,  3,  4,  5,  6,  7,  8, 9,
                            10, 11,   12, 13, 14,  15, 16, 17, 18, 19,  20, 21, 22, 23, 24, 25, 26});
  cases.push_back(uneven);
  Case window = base("window_over_long_keys", Dtype::bfloat16);
  window.problem.seq_kv = 1500, window.problem.seq_q = 3, window.problem.window_left = 150, window.problem.causal = true;
  cases.push_back(window);
  Case heads = base("window_of_many_heads", Dtype::bfloat16);  // a block goes from head to head, past the same keys
  heads.problem.seq_kv = 700, heads.problem.seq_q = 1, heads.problem.window_left = 150, heads.problem.causal = true;
  heads.problem.heads_q = heads.problem.heads_kv = 8;
  cases.push_back(heads);
  Case masked = base("masked", Dtype::bfloat16);
  masked.problem.seq_q = 7, masked.problem.heads_q = 6, masked.nan_value = 30;
  masked.problem.mask = over(masked.problem, true, true, true);
  masked.problem.bias = over(masked.problem, true, true, true, Dtype::bfloat16);
  cases.push_back(masked);
  Case wide = base("head_dim_256", Dtype::bfloat16);
  wide.problem.seq_q = 4, wide.problem.heads_q = 16, wide.problem.head_dim = 256, wide.problem.head_dim_v = 200;
  wide.problem.sink = wide.problem.causal = true, wide.problem.seq_kv = 300;
  cases.push_back(wide);
  Case nan = base("nan_query_of_many_parts", Dtype::bfloat16);  // no score of the row is a number, in any part
  nan.problem.seq_q = 3, nan.problem.seq_kv = 700, nan.problem.sink = true, nan.nan_query = 1;
  cases.push_back(nan);
  Case long_keys = base("more_parts_than_lanes", Dtype::bfloat16);
  long_keys.problem.batch = long_keys.problem.seq_q = 1, long_keys.problem.seq_kv = 4500, long_keys.draw = Draw::growing;
  long_keys.problem.heads_q = long_keys.problem.heads_kv = 1;
  cases.push_back(long_keys);
  for (const Case& c : long_and_many()) cases.push_back(c);
  Case unused = base("unused_rows_and_sink", Dtype::bfloat16);
  unused.problem.seq_q = 4, unused.problem.sink = unused.problem.seqused_q = true, unused.seqused_q = {2, 0};
  cases.push_back(unused);
  return cases;
}

inline Case shape(const char* name, std::int64_t group, std::int64_t seq_q, std::int64_t seq_kv) {
  Case c = base(name, Dtype::bfloat16);
  c.problem.heads_kv = 2, c.problem.heads_q = 2 * group, c.problem.seq_q = seq_q, c.problem.seq_kv = seq_kv;
  c.problem.causal = true;
  return c;
}

/// Items that several blocks share, one difficulty in each: fewer tiles than blocks, rows that end in the middle of a tile
/// of rows, rows that a NaN behind the mask must not reach, values that are not a multiple of 32 columns.
inline std::vector<Case> shared_items() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t group, std::int64_t seq_q, std::int64_t seq_kv) -> Case& {
    Case c = shape(name, group, seq_q, seq_kv);
    c.problem.batch = 1, c.problem.causal = false;
    cases.push_back(c);
    return cases.back();
  };
  add("shared_by_four", 4, 1, 600).problem.sink = true;
  Case& few = add("shared_one_tile", 4, 1, 1500);
  put_in_pages(few, 64, {70});
  Case& five = add("shared_five_parts", 4, 1, 1500);
  put_in_pages(five, 64, {600});
  Case& none = add("shared_no_key", 4, 1, 1500);
  put_in_pages(none, 64, {0});
  Case& two = add("shared_two_tiles_of_rows", 8, 3, 400);  // wide values leave room for 16 rows
  two.problem.head_dim = two.problem.head_dim_v = 136;
  Case& masked = add("shared_masked", 4, 4, 700);
  masked.problem.causal = true, masked.nan_value = 698;
  Case& cut = add("eight_sms_many_rows", 16, 4, 1100);  // tiles of 32, of two warps, that two blocks share
  cut.problem.causal = true, cut.nan_value = 1098;
  Case& nan = add("shared_nan_query", 4, 1, 700);  // no score of the row is a number, in any part
  nan.problem.sink = true, nan.nan_query = 0;
  add("shared_by_six", 4, 1, 900).problem.batch = 5;  // 40 SMs have two blocks each of narrow heads
  Case& wide = add("shared_narrow_values", 3, 2, 700);
  wide.problem.head_dim = 64, wide.problem.head_dim_v = 40;
  return cases;
}

/// Heads wider than 256, whose columns of O two warps share: boxes of pages and of tiles, values of fewer panels than warps
/// have, edges, rows that see nothing, items that blocks share.
inline std::vector<Case> wide_rows() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t dim, std::int64_t dim_v, std::int64_t group,
                       std::int64_t seq_q) -> Case& {
    cases.push_back(shape(name, group, seq_q, 180));
    cases.back().problem.head_dim = dim, cases.back().problem.head_dim_v = dim_v;
    return cases.back();
  };
  put_in_pages(add("wide_pages", 512, 512, 2, 1), 64, {180, 0, 67});
  Case& rows = add("wide_tiles_of_rows", 512, 512, 8, 3);
  rows.problem.window_left = 90, rows.nan_value = 178, rows.problem.batch = 1;
  Case& shared = add("shared_wide", 512, 512, 1, 2);
  shared.problem.batch = 1, shared.problem.seq_kv = 450, shared.problem.sink = true, shared.draw = Draw::growing;
  Case& odd = add("wide_odd_columns", 328, 320, 4, 1);
  odd.problem.dtype = Dtype::float16, odd.problem.softcap = 5, odd.problem.alibi = true;
  put_in_pages(odd, 16, {131, 60});
  add("wide_keys", 512, 40, 4, 1).problem.batch = 1;
  Case& values = add("wide_values", 64, 264, 4, 4);
  values.problem.seqused_kv = true, values.seqused_kv = {97, 180};
  values.problem.mask = over(values.problem, true, true, true);
  Case& codes = add("wide_codes", 512, 512, 2, 1);
  codes.problem.kv_dtype = Dtype::float8_e4m3, codes.problem.kv_scales = ScaleKind::head;
  put_in_pages(codes, 32, {131, 33});
  return cases;
}

/// Latent keys, without those of 8 bits.
inline std::vector<Case> latent_16_bits() {
  std::vector<Case> cases = latent_cases(Dtype::bfloat16);
  std::erase_if(cases, [](const Case& c) { return c.problem.kv_dtype.has_value(); });
  return cases;
}

/// Pages of which a tile has several, one or a part; one page for a whole sequence, which ends inside of a tile. What lies
/// outside of what is visible is NaN.
inline std::vector<Case> box_cases() {
  std::vector<Case> cases;
  for (const std::int64_t page_size : {8, 16, 32, 64, 128, 256, 200, 40}) {
    const bool whole_sequence = page_size == 200 || page_size == 40;
    Case c = shape(("pages_of_" + std::to_string(page_size)).c_str(), 4, 2, whole_sequence ? page_size : 600);
    const auto longest = static_cast<std::int32_t>(c.problem.seq_kv);
    put_in_pages(c, page_size, {longest, 1, 0, longest - 1, longest / 2 + 3});
    cases.push_back(c);
  }
  Case padded = shape("left_padding", 4, 1, 300);
  put_in_pages(padded, 16, {300, 150, 20});
  padded.problem.left_padding = true, padded.left_padding = {0, 140, 20};
  cases.push_back(padded);
  Case window = shape("window", 8, 1, 700);
  window.problem.window_left = 150, window.problem.seqused_kv = true, window.seqused_kv = {690, 131};
  window.nan_value = 10;
  cases.push_back(window);
  Case wide = shape("head_dim_200_by_72", 16, 1, 300);
  wide.problem.head_dim = 200, wide.problem.head_dim_v = 72, wide.problem.sink = true;
  cases.push_back(wide);
  Case many = shape("a_tile_of_64_rows", 16, 4, 600);  // four warps have the same keys
  put_in_pages(many, 16, {600, 3, 0, 470});
  cases.push_back(many);
  Case two = shape("rows_of_two_warps", 8, 3, 500);
  two.problem.seqused_kv = true, two.seqused_kv = {490, 131}, two.nan_value = 495;
  cases.push_back(two);
  Case narrow = shape("head_dim_64_packed", 4, 3, 0);
  narrow.problem.head_dim = 64;
  narrow.problem.packed = true, narrow.cu_seqlens_q = {0, 3, 3, 5}, narrow.cu_seqlens_kv = {0, 150, 171, 400};
  narrow.problem.total_q = 5, narrow.problem.total_kv = 400, narrow.problem.batch = 3;
  narrow.problem.seq_q = 3, narrow.problem.seq_kv = 229;
  cases.push_back(narrow);
  return cases;
}

}  // namespace flash_attention::testing
