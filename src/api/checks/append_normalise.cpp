#include <cmath>
#include <limits>
#include <numeric>

#include "api/checks/append_problem.h"
#include "api/checks/narrow.h"
#include "api/checks/overlap.h"
#include "api/checks/refuse.h"
#include "plan/append.h"

namespace flash_attention::api {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();

void check_range(const char* argument, std::int64_t got, std::int64_t smallest, std::int64_t largest = most) {
  if (got >= smallest && got <= largest) return;
  refuse(argument, std::to_string(got), "allowed are " + std::to_string(smallest) + " to " + std::to_string(largest));
}

void check_wide(const char* argument, Dtype got) {
  require(got == Dtype::float32 || got == Dtype::float16 || got == Dtype::bfloat16, argument,
          static_cast<std::int64_t>(got), "allowed are float32, float16 and bfloat16");
}

/// Dense strides if none are given. Offsets must stay in 64 bits.
Strides resolve(const char* argument, Strides s, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, bool one_batch) {
  if (s.head == Strides::dense) s.head = dim;
  if (s.seq == Strides::dense) s.seq = heads * dim;
  if (one_batch) s.batch = 0;
  if (s.batch == Strides::dense) s.batch = rows * s.seq;
  const auto reach = [](std::int64_t stride, std::int64_t size) {
    return std::abs(static_cast<double>(stride)) * static_cast<double>(size);
  };
  const bool good = reach(s.head, heads) <= 0x1p58 && reach(s.seq, rows) <= 0x1p58 && reach(s.batch, batch) <= 0x1p58;
  if (!good) refuse(argument, std::to_string(s.seq), "offsets must stay below 2^58 elements");
  return s;
}

void check_pages(AppendProblem& p) {
  check_range("page_size", p.page_size, 0);
  if (p.page_size == 0) {
    require(p.num_pages == 0, "num_pages", p.num_pages, "it belongs to pages, and page_size is 0");
    require(p.page_table_stride == 0, "page_table_stride", p.page_table_stride, "it belongs to pages, and page_size is 0");
    return;
  }
  check_range("num_pages", p.num_pages, 0);
  if (p.capacity == 0) p.capacity = p.page_table_stride * p.page_size;
  const std::int64_t needed = (p.capacity + p.page_size - 1) / p.page_size;
  if (p.page_table_stride == 0) p.page_table_stride = needed;
  if (p.page_table_stride < needed) {
    refuse(
        "page_table_stride", std::to_string(p.page_table_stride),
        std::to_string(p.capacity) + " rows need " + std::to_string(needed) + " pages of " + std::to_string(p.page_size));
  }
}

void check_rotary(AppendProblem& p) {
  check_wide("rotary_dtype", p.rotary_dtype);
  if (p.rotary_dim % 2 != 0 || p.rotary_dim < 0 || p.rotary_dim > p.head_dim) {
    refuse("rotary_dim", std::to_string(p.rotary_dim),
           "allowed are 0 and even numbers up to head_dim, " + std::to_string(p.head_dim));
  }
  if (p.rotary_dim == 0) {
    p.rotary_interleaved = p.rotary_one_query = false;
    require(!p.rotary_offsets, "rotary_offsets", std::int64_t{1}, "rotary_dim is 0: nothing is rotated");
    return;
  }
  check_range("rotary_positions", p.rotary_positions, plan::query_tokens(p) + plan::new_tokens(p) > 0 ? 1 : 0);
  if (p.rotary_stride == 0) p.rotary_stride = p.rotary_dim / 2;
  require(p.rotary_stride >= p.rotary_dim / 2, "rotary_stride", p.rotary_stride, "a row has rotary_dim / 2 elements");
}

void check_angles(AppendProblem& p) {
  check_range("angle_sections", p.angle_sections, 0, static_cast<std::int64_t>(p.rotary_sections.size()));
  const std::int64_t pairs = std::accumulate(p.rotary_sections.begin(), p.rotary_sections.end(), std::int64_t{0});
  if (p.angle_sections <= 1) {
    require(pairs == 0, "rotary_sections", pairs, "there are no sections: angle_sections is not 2 and up");
    require(!p.sections_interleaved, "sections_interleaved", std::int64_t{1}, "there are no sections");
  } else {
    for (std::size_t i = 0; i < p.rotary_sections.size(); ++i)
      check_range("rotary_sections", p.rotary_sections[i], 0, static_cast<std::int64_t>(i) < p.angle_sections ? most : 0);
    require(pairs == p.rotary_dim / 2, "rotary_sections", pairs, "the pairs of all sections must be rotary_dim / 2");
  }
  if (p.angle_sections == 0) return;
  require(p.rotary_dim > 0, "angle_sections", p.angle_sections, "rotary_dim is 0: nothing is rotated");
  require(!p.rotary_offsets && !p.rotary_one_query, "rotary_offsets", std::int64_t{1},
          "angle_positions has the angle of every token");
  require(plan::query_tokens(p) == 0 || plan::new_tokens(p) == 0 || plan::query_tokens(p) == plan::new_tokens(p),
          "angle_sections", p.angle_sections, "queries and keys have the same angles, and must be as many tokens");
}

void check_norms(AppendProblem& p) {
  check_wide("norm_dtype", p.norm_dtype);
  if (!p.q_norm && !p.k_norm) {
    require(!p.norm_plus_one, "norm_plus_one", std::int64_t{1}, "there is no norm");
    p.norm_dtype = Dtype::float32, p.norm_eps = AppendProblem{}.norm_eps;
    return;
  }
  if (!std::isfinite(p.norm_eps) || p.norm_eps < 0)
    refuse("norm_eps", std::to_string(p.norm_eps), "allowed are 0 and positive finite numbers");
}

void check_in_rows(const AppendProblem& p) {
  if (!p.in_rows) return;
  const auto no = [](const char* argument, std::int64_t got) {
    require(got == 0, argument, got, "with in_rows there is no cache: keys go to rows of their own");
  };
  no("page_size", p.page_size), no("scales", static_cast<std::int64_t>(p.scales)), no("placed", p.placed ? 1 : 0);
  require(*p.cache_dtype == p.dtype, "cache_dtype", static_cast<std::int64_t>(*p.cache_dtype), "with in_rows it is dtype");
}

void check_scales(AppendProblem& p) {
  const bool narrow = size_of(*p.cache_dtype) == 1;
  require(p.scales <= ScaleKind::token, "scales", static_cast<std::int64_t>(p.scales),
          "allowed are none, tensor, head and token");
  if (p.scales != ScaleKind::none && !narrow) {
    refuse("scales", std::string(to_string(p.scales)),
           "they belong to caches of float8_e4m3, float8_e5m2, int8 and nvfp4, and this one is " +
               std::string(to_string(*p.cache_dtype)));
  }
  check_scales_of_groups("scales", *p.cache_dtype, p.scales);
  const std::int64_t pages = p.page_size != 0 ? p.num_pages : p.batch;
  const std::int64_t rows = p.page_size != 0 ? p.page_size : p.capacity;
  const auto strides = [&](const char* argument, Strides given) {
    if (p.scales == ScaleKind::none || p.scales == ScaleKind::tensor) return Strides{0, 0, 0};
    if (p.scales == ScaleKind::token) return resolve(argument, given, pages, rows, p.heads_kv, 1, false);
    if (given.batch == Strides::dense) given.batch = p.heads_kv;
    given.seq = 0;
    return resolve(argument, given, p.batch, 1, p.heads_kv, 1, false);
  };
  p.k_scale_strides = strides("k_scale_strides", p.k_scale_strides);
  p.v_scale_strides = strides("v_scale_strides", p.v_scale_strides);
  if (p.scales != ScaleKind::token || plan::new_tokens(p) == 0) return;
  refuse_self_overlap("k_scale_strides", p.k_scale_strides, pages, rows, p.heads_kv, 1);
  refuse_self_overlap("v_scale_strides", p.v_scale_strides, pages, rows, p.heads_kv, 1);
}

/// A cache of 4 bits: scales of groups, and of int4 zeros.
void check_groups(AppendProblem& p) {
  p.cache_group = check_group("cache_group", *p.cache_dtype, p.cache_group, p.head_dim, p.head_dim_v);
  if (p.cache_group == 0) {
    p.k_group_strides = p.v_group_strides = Strides{0, 0, 0};
    return;
  }
  const std::int64_t pages = p.page_size != 0 ? p.num_pages : p.batch;
  const std::int64_t rows = p.page_size != 0 ? p.page_size : p.capacity;
  const auto strides = [&](const char* argument, const Strides& given, std::int64_t dim) {
    const std::int64_t groups = dim / p.cache_group;
    const Strides s = resolve(argument, given, pages, rows, p.heads_kv, groups, false);
    if (plan::new_tokens(p) > 0) refuse_self_overlap(argument, s, pages, rows, p.heads_kv, groups);
    return s;
  };
  p.k_group_strides = strides("k_group_strides", p.k_group_strides, p.head_dim);
  p.v_group_strides = strides("v_group_strides", p.v_group_strides, p.head_dim_v);
}

}  // namespace

AppendProblem normalise(const AppendProblem& problem) {
  AppendProblem p = problem;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  if (!p.cache_dtype) p.cache_dtype = p.dtype;
  check_range("batch", p.batch, 0);
  check_range("seq_new", p.seq_new, 0);
  check_range("seq_q", p.seq_q, 0);
  check_range("heads_q", p.heads_q, 1);
  check_range("heads_kv", p.heads_kv, 1);
  check_range("head_dim", p.head_dim, 1, plan::append_head_dim);
  check_range("head_dim_v", p.head_dim_v, 1, plan::append_head_dim);
  check_range("capacity", p.capacity, 0);
  check_wide("dtype", p.dtype);
  require(*p.cache_dtype <= Dtype::int4, "cache_dtype", static_cast<std::int64_t>(*p.cache_dtype), "it is no Dtype");
  require(!p.placed || !(p.packed_new || p.packed_q), "placed", std::int64_t{1},
          "rows that say where they belong need no cu_seqlens: packed_new and packed_q must be false");
  check_range("total_new", plan::new_tokens(p), 0);
  check_range("total_q", plan::query_tokens(p), 0);
  require(!p.placed || p.total_q == 0 || p.total_new == 0 || p.total_q == p.total_new, "total_q", p.total_q,
          "queries have the positions of the new rows, and must be as many");
  require(!p.placed || !(p.rotary_offsets || p.rotary_one_query), "rotary_offsets", std::int64_t{1},
          "rows that say where they belong have the angles of their positions");
  require(p.batch > 0 || plan::new_tokens(p) + plan::query_tokens(p) == 0, "batch", p.batch, "rows need a sequence");
  if (p.packed_new || p.placed) p.seq_new = 0;
  if (p.packed_q || p.placed) p.seq_q = 0;
  check_in_rows(p);
  check_pages(p);
  check_rotary(p);
  check_angles(p);
  check_norms(p);
  const bool one_q = p.packed_q || p.placed, one_new = p.packed_new || p.placed;
  const std::int64_t rows_q = one_q ? p.total_q : p.seq_q, rows_new = one_new ? p.total_new : p.seq_new;
  const std::int64_t pages = p.page_size != 0 ? p.num_pages : p.batch;
  const std::int64_t rows = p.page_size != 0 ? p.page_size : p.in_rows ? rows_new : p.capacity;
  p.q_strides = resolve("q_strides", p.q_strides, p.batch, rows_q, p.heads_q, p.head_dim, one_q);
  p.q_out_strides = resolve("q_out_strides", p.q_out_strides, p.batch, rows_q, p.heads_q, p.head_dim, one_q);
  p.k_strides = resolve("k_strides", p.k_strides, p.batch, rows_new, p.heads_kv, p.head_dim, one_new);
  p.v_strides = resolve("v_strides", p.v_strides, p.batch, rows_new, p.heads_kv, p.head_dim_v, one_new);
  check_groups(p);
  const std::int64_t key_columns = stored_columns(*p.cache_dtype, p.head_dim);
  const std::int64_t value_columns = stored_columns(*p.cache_dtype, p.head_dim_v);
  p.k_cache_strides =
      resolve("k_cache_strides", p.k_cache_strides, pages, rows, p.heads_kv, key_columns, p.in_rows && one_new);
  p.v_cache_strides = resolve("v_cache_strides", p.v_cache_strides, pages, rows, p.heads_kv, value_columns, false);
  for (const bool of_q : {true, false}) {
    Strides &given = of_q ? p.dq_out_strides : p.dk_out_strides, &made = of_q ? p.dq_strides : p.dk_strides;
    const std::int64_t tokens = of_q ? rows_q : rows_new, heads = of_q ? p.heads_q : p.heads_kv;
    const bool one = of_q ? one_q : one_new;
    given = resolve(of_q ? "dq_out_strides" : "dk_out_strides", given, p.batch, tokens, heads, p.head_dim, one);
    made = resolve(of_q ? "dq_strides" : "dk_strides", made, p.batch, tokens, heads, p.head_dim, one);
    if (p.in_rows && tokens > 0)
      refuse_self_overlap(of_q ? "dq_strides" : "dk_strides", made, one ? 1 : p.batch, tokens, heads, p.head_dim);
  }
  if (plan::query_tokens(p) > 0)
    refuse_self_overlap("q_out_strides", p.q_out_strides, one_q ? 1 : p.batch, rows_q, p.heads_q, p.head_dim);
  if (plan::new_tokens(p) > 0) {
    const bool one = p.in_rows && one_new;
    refuse_self_overlap("k_cache_strides", p.k_cache_strides, one ? 1 : pages, rows, p.heads_kv, key_columns);
    if (!p.in_rows) refuse_self_overlap("v_cache_strides", p.v_cache_strides, pages, rows, p.heads_kv, value_columns);
  }
  check_scales(p);
  return p;
}

}  // namespace flash_attention::api
