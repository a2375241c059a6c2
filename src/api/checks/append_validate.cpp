#include <algorithm>
#include <cmath>

#include "api/backends.h"
#include "api/checks/append_problem.h"
#include "api/checks/overlap.h"
#include "api/checks/pointers.h"
#include "api/checks/refuse.h"
#include "plan/append.h"

namespace flash_attention::api {
namespace {

std::string entry(const char* argument, std::int64_t i) { return std::string(argument) + "[" + std::to_string(i) + "]"; }

void check_pointers(const AppendProblem& p, const AppendBuffers& b, Device device) {
  const Backend& backend = backend_of(device);
  const std::size_t wide = backend.alignment(size_of(p.dtype)), cached = backend.alignment(size_of(*p.cache_dtype));
  const bool queries = plan::query_tokens(p) > 0, rows = plan::new_tokens(p) > 0;
  check_pointer("q", b.q, queries, wide);
  check_pointer("q_out", b.q_out, queries, wide);
  check_pointer("k", b.k, rows, wide);
  if (p.in_rows && (b.v != nullptr || b.v_cache != nullptr))
    refuse(b.v != nullptr ? "v" : "v_cache", address(b.v != nullptr ? b.v : b.v_cache), "with in_rows there are no values");
  check_pointer("v", b.v, rows && !p.in_rows, wide);
  check_pointer("k_cache", b.k_cache, rows && (p.in_rows || p.capacity > 0), cached);
  check_pointer("v_cache", b.v_cache, rows && !p.in_rows && p.capacity > 0, cached);
  const std::size_t weight = backend.alignment(size_of(p.norm_dtype));
  if (!p.q_norm && b.q_norm_weight != nullptr) refuse("q_norm_weight", address(b.q_norm_weight), "q_norm is false");
  if (!p.k_norm && b.k_norm_weight != nullptr) refuse("k_norm_weight", address(b.k_norm_weight), "k_norm is false");
  check_pointer("q_norm_weight", b.q_norm_weight, false, weight);
  check_pointer("k_norm_weight", b.k_norm_weight, false, weight);
  check_pair("angle_positions", b.angle_positions, p.angle_sections > 0, "angle_sections", 4, !queries && !rows);
  const std::size_t table = backend.alignment(size_of(p.rotary_dtype));
  const bool nothing = !queries && !rows;
  check_pair("cos", b.cos, p.rotary_dim > 0, "rotary_dim", table, nothing);
  check_pair("sin", b.sin, p.rotary_dim > 0, "rotary_dim", table, nothing);
  if (p.placed && b.lengths != nullptr) refuse("lengths", address(b.lengths), "positions say where each row belongs");
  check_pointer("lengths", b.lengths, false, 4);
  check_pair("rotary_offsets", b.rotary_offsets, p.rotary_offsets, "rotary_offsets", 4, nothing);
  check_pair("cu_seqlens_new", b.cu_seqlens_new, p.packed_new, "packed_new", 4);
  check_pair("cu_seqlens_q", b.cu_seqlens_q, p.packed_q, "packed_q", 4);
  check_pair("sequences", b.sequences, p.placed, "placed", 4, nothing);
  check_pair("positions", b.positions, p.placed, "placed", 4, nothing);
  check_pair("page_table", b.page_table, p.page_size != 0, "page_size", 4, !rows || p.capacity == 0);
  check_pair("k_scale", b.k_scale, p.scales != ScaleKind::none, "scales", 4, !rows);
  check_pair("v_scale", b.v_scale, p.scales != ScaleKind::none, "scales", 4, !rows);
  const bool zeros = *p.cache_dtype == Dtype::int4;
  const std::size_t of_groups = backend.alignment(zeros ? size_of(p.dtype) : 1);
  check_pair("k_group_scale", b.k_group_scale, p.cache_group != 0, "cache_dtype", of_groups, !rows);
  check_pair("v_group_scale", b.v_group_scale, p.cache_group != 0, "cache_dtype", of_groups, !rows);
  check_pair("k_group_zero", b.k_group_zero, zeros, "cache_dtype", of_groups, !rows);
  check_pair("v_group_zero", b.v_group_zero, zeros, "cache_dtype", of_groups, !rows);
}

void check_angle(const AppendProblem& p, const std::string& argument, std::int64_t got, std::int64_t last) {
  if (p.rotary_dim == 0 || (got >= 0 && last < p.rotary_positions)) return;
  refuse(
      argument, std::to_string(got),
      "cos and sin have " + std::to_string(p.rotary_positions) + " positions, and " + std::to_string(last) + " is needed");
}

void check_page(const AppendProblem& p, const AppendBuffers& b, std::int64_t sequence, std::int64_t column) {
  const std::int64_t page = b.page_table[sequence * p.page_table_stride + column];
  if (page >= 0 && page < p.num_pages) return;
  refuse("page_table[" + std::to_string(sequence) + "][" + std::to_string(column) + "]", std::to_string(page),
         "a new row goes there, and the caches have the pages 0 to " + std::to_string(p.num_pages - 1));
}

/// Checks the sequences and positions of placed rows.
void check_places(const AppendProblem& p, const AppendBuffers& b) {
  for (std::int64_t i = 0; i < std::max(p.total_new, p.total_q); ++i) {
    if (b.sequences[i] < 0 || b.sequences[i] >= p.batch) {
      refuse(entry("sequences", i), std::to_string(b.sequences[i]), "allowed are 0 to " + std::to_string(p.batch - 1));
    }
    if (p.total_new > 0 && (b.positions[i] < 0 || b.positions[i] >= p.capacity)) {
      refuse(entry("positions", i), std::to_string(b.positions[i]),
             "the cache has room for " + std::to_string(p.capacity) + " rows of a sequence");
    }
    if (p.angle_sections == 0) check_angle(p, entry("positions", i), b.positions[i], b.positions[i]);
    if (p.page_size != 0 && p.total_new > 0) check_page(p, b, b.sequences[i], b.positions[i] / p.page_size);
  }
}

void check_lengths(const AppendProblem& p, const AppendBuffers& b) {
  for (std::int64_t i = 0; i < p.batch; ++i) {
    const std::int64_t length = b.lengths != nullptr ? b.lengths[i] : 0;
    const std::int64_t rows = p.packed_new ? std::int64_t{b.cu_seqlens_new[i + 1]} - b.cu_seqlens_new[i] : p.seq_new;
    const std::int64_t queries = p.packed_q ? std::int64_t{b.cu_seqlens_q[i + 1]} - b.cu_seqlens_q[i] : p.seq_q;
    if (rows > 0 && !p.in_rows && (length < 0 || length + rows > p.capacity)) {
      refuse(entry("lengths", i), std::to_string(length),
             "with " + std::to_string(rows) + " new rows; the cache has room for " + std::to_string(p.capacity));
    }
    const std::int64_t rotated = std::max(rows, p.rotary_one_query ? std::min<std::int64_t>(queries, 1) : queries);
    const std::int64_t first = b.rotary_offsets != nullptr ? b.rotary_offsets[i] : length;
    if (rotated > 0 && p.angle_sections == 0)
      check_angle(p, entry(b.rotary_offsets != nullptr ? "rotary_offsets" : "lengths", i), first, first + rotated - 1);
    if (p.page_size == 0 || rows == 0) continue;
    for (std::int64_t column = length / p.page_size; column * p.page_size < length + rows; ++column)
      check_page(p, b, i, column);
  }
}

void check_angles(const AppendProblem& p, const AppendBuffers& b) {
  const std::int64_t tokens = std::max(plan::query_tokens(p), plan::new_tokens(p));
  for (std::int64_t i = 0; i < p.angle_sections * tokens; ++i) {
    check_angle(p, entry("angle_positions", i), b.angle_positions[i], b.angle_positions[i]);
  }
}

void check_scales(const AppendProblem& p, const char* argument, const float* scales, const Strides& s) {
  if (p.scales == ScaleKind::none || p.scales == ScaleKind::token || plan::new_tokens(p) == 0) return;
  const bool one = p.scales == ScaleKind::tensor;
  for (std::int64_t i = 0; i < (one ? 1 : p.batch); ++i) {
    for (std::int64_t head = 0; head < (one ? 1 : p.heads_kv); ++head) {
      const float got = scales[i * s.batch + head * s.head];
      if (std::isfinite(got) && got > 0) continue;
      refuse(std::string(argument) + (one ? "" : "[" + std::to_string(i) + "][" + std::to_string(head) + "]"),
             std::to_string(got), "allowed are positive finite numbers");
    }
  }
}

void check_overlap(const AppendProblem& p, const AppendBuffers& b) {
  const auto view = [](const char* name, const void* data, Dtype dtype, const Strides& s, std::int64_t batch,
                       std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return Extent{name,
                  static_cast<const char*>(data),
                  static_cast<std::int64_t>(size_of(dtype)),
                  {batch, rows, heads, dim},
                  {s.batch, s.seq, s.head, 1}};
  };
  const auto list = [](const char* name, const std::int32_t* data, std::int64_t count) {
    return Extent{name, reinterpret_cast<const char*>(data), 4, {1, 1, 1, count}, {0, 0, 0, 1}};
  };
  const std::int64_t batch_q = p.packed_q || p.placed ? 1 : p.batch, batch_new = p.packed_new || p.placed ? 1 : p.batch;
  const std::int64_t rows_q = plan::query_tokens(p) / std::max<std::int64_t>(batch_q, 1);
  const std::int64_t rows_new = plan::new_tokens(p) / std::max<std::int64_t>(batch_new, 1);
  const std::int64_t pages = p.page_size != 0 ? p.num_pages : p.batch;
  const std::int64_t rows = p.page_size != 0 ? p.page_size : p.in_rows ? rows_new : p.capacity;
  const std::int64_t places = std::max(p.total_new, p.total_q);
  const bool in_place = b.q == b.q_out && p.q_strides == p.q_out_strides;
  const Extent q = view("q", in_place ? nullptr : b.q, p.dtype, p.q_strides, batch_q, rows_q, p.heads_q, p.head_dim);
  const Extent q_out = view("q_out", b.q_out, p.dtype, p.q_out_strides, batch_q, rows_q, p.heads_q, p.head_dim);
  const bool keys_in_place = p.in_rows && b.k == b.k_cache && p.k_strides == p.k_cache_strides;
  const Extent k =
      view("k", keys_in_place ? nullptr : b.k, p.dtype, p.k_strides, batch_new, rows_new, p.heads_kv, p.head_dim);
  const Extent v = view("v", b.v, p.dtype, p.v_strides, batch_new, rows_new, p.heads_kv, p.head_dim_v);
  const Extent k_cache = view("k_cache", b.k_cache, *p.cache_dtype, p.k_cache_strides, p.in_rows ? batch_new : pages, rows,
                              p.heads_kv, stored_columns(*p.cache_dtype, p.head_dim));
  const Extent v_cache = view("v_cache", b.v_cache, *p.cache_dtype, p.v_cache_strides, pages, rows, p.heads_kv,
                              stored_columns(*p.cache_dtype, p.head_dim_v));
  const auto groups = [&](const char* name, const void* data, const Strides& s, std::int64_t dim) {
    const Dtype scales = *p.cache_dtype == Dtype::int4 ? p.dtype : Dtype::int8;  // of a byte
    return view(name, p.cache_group == 0 ? nullptr : data, scales, s, pages, rows, p.heads_kv,
                dim / std::max<std::int64_t>(p.cache_group, 1));
  };
  const Extent k_group_scale = groups("k_group_scale", b.k_group_scale, p.k_group_strides, p.head_dim);
  const Extent v_group_scale = groups("v_group_scale", b.v_group_scale, p.v_group_strides, p.head_dim_v);
  const Extent k_group_zero = groups("k_group_zero", b.k_group_zero, p.k_group_strides, p.head_dim);
  const Extent v_group_zero = groups("v_group_zero", b.v_group_zero, p.v_group_strides, p.head_dim_v);
  const auto table = [&](const char* name, const void* data) {
    return view(name, data, p.rotary_dtype, {0, p.rotary_stride, 0}, 1, p.rotary_positions, 1, p.rotary_dim / 2);
  };
  const auto weight_size = static_cast<std::int64_t>(size_of(p.norm_dtype));
  const auto refuse_if_shared = [&](std::initializer_list<Extent> outputs) {
    refuse_overlap(
        outputs,
        {q, k, v, table("cos", b.cos), table("sin", b.sin), list("lengths", b.lengths, p.batch),
         list("rotary_offsets", b.rotary_offsets, p.batch), list("cu_seqlens_new", b.cu_seqlens_new, p.batch + 1),
         list("cu_seqlens_q", b.cu_seqlens_q, p.batch + 1), list("sequences", b.sequences, places),
         list("positions", b.positions, places), list("page_table", b.page_table, p.batch * p.page_table_stride),
         list("angle_positions", b.angle_positions,
              p.angle_sections * std::max(plan::query_tokens(p), plan::new_tokens(p))),
         Extent{
             "q_norm_weight", static_cast<const char*>(b.q_norm_weight), weight_size, {1, 1, 1, p.head_dim}, {0, 0, 0, 1}},
         Extent{"k_norm_weight",
                static_cast<const char*>(b.k_norm_weight),
                weight_size,
                {1, 1, 1, p.head_dim},
                {0, 0, 0, 1}}});
  };
  if (p.page_size == 0 || b.k_cache == b.v_cache)
    return refuse_if_shared({q_out, k_cache, v_cache, k_group_scale, v_group_scale, k_group_zero, v_group_zero});
  // Pages of keys and of values may be from one pool; only the table tells them apart.
  refuse_if_shared({q_out, k_cache, k_group_scale, k_group_zero});
  refuse_if_shared({q_out, v_cache, v_group_scale, v_group_zero});
}

}  // namespace

void validate(const AppendProblem& p, const AppendBuffers& b, const Options& options) {
  if (!device_traits(options.device).streams && options.stream != nullptr) {
    refuse("stream", address(options.stream), "only CUDA devices have streams; the device is " + to_string(options.device));
  }
  check_pointers(p, b, options.device);
  if (device_traits(options.device).host_memory) {
    if (p.packed_new) check_cu_seqlens("cu_seqlens_new", b.cu_seqlens_new, p.batch, p.total_new, p.total_new);
    if (p.packed_q) check_cu_seqlens("cu_seqlens_q", b.cu_seqlens_q, p.batch, p.total_q, p.total_q);
    if (p.placed) {
      check_places(p, b);
    } else {
      check_lengths(p, b);
    }
    check_angles(p, b);
    check_scales(p, "k_scale", b.k_scale, p.k_scale_strides);
    check_scales(p, "v_scale", b.v_scale, p.v_scale_strides);
  }
  check_overlap(p, b);
}

void validate(const AppendProblem& p, const AppendBuffers& b, const AppendGradients& g, Device device) {
  require(p.in_rows, "in_rows", std::int64_t{0}, "what is written into a cache has no gradient: in_rows must be true");
  const std::size_t wide = backend_of(device).alignment(size_of(p.dtype));
  const bool queries = plan::query_tokens(p) > 0, rows = plan::new_tokens(p) > 0;
  check_pointer("q", b.q, queries && p.q_norm, wide);
  check_pointer("k", b.k, rows && p.k_norm, wide);
  check_pointer("dq_out", g.dq_out, queries, wide);
  check_pointer("dk_out", g.dk_out, rows, wide);
  check_pointer("dq", g.dq, queries, wide);
  check_pointer("dk", g.dk, rows, wide);
  if (g.dq_norm_weight != nullptr && !p.q_norm) refuse("dq_norm_weight", address(g.dq_norm_weight), "q_norm is false");
  if (g.dk_norm_weight != nullptr && !p.k_norm) refuse("dk_norm_weight", address(g.dk_norm_weight), "k_norm is false");
  check_pointer("dq_norm_weight", g.dq_norm_weight, false, 4);
  check_pointer("dk_norm_weight", g.dk_norm_weight, false, 4);
  check_pointer("workspace", g.workspace, g.dq_norm_weight != nullptr || g.dk_norm_weight != nullptr, 16);
  const std::int64_t batch_q = p.packed_q ? 1 : p.batch, batch_new = p.packed_new ? 1 : p.batch;
  const auto view = [&](const char* name, const void* data, const Strides& s, std::int64_t batch, std::int64_t tokens,
                        std::int64_t heads) {
    return Extent{name,
                  static_cast<const char*>(data),
                  static_cast<std::int64_t>(size_of(p.dtype)),
                  {batch, tokens / std::max<std::int64_t>(batch, 1), heads, p.head_dim},
                  {s.batch, s.seq, s.head, 1}};
  };
  const auto of_q = [&](const char* name, const void* data, const Strides& s) {
    return view(name, data, s, batch_q, plan::query_tokens(p), p.heads_q);
  };
  const auto of_k = [&](const char* name, const void* data, const Strides& s) {
    return view(name, data, s, batch_new, plan::new_tokens(p), p.heads_kv);
  };
  refuse_overlap({of_q("dq", g.dq, p.dq_strides), of_k("dk", g.dk, p.dk_strides)},
                 {of_q("q", b.q, p.q_strides), of_k("k", b.k, p.k_strides), of_q("dq_out", g.dq_out, p.dq_out_strides),
                  of_k("dk_out", g.dk_out, p.dk_out_strides)});
}

}  // namespace flash_attention::api
