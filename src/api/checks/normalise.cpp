#include <cmath>
#include <limits>

#include "api/checks/narrow.h"
#include "api/checks/overlap.h"
#include "api/checks/program_options.h"
#include "api/checks/refuse.h"
#include "api/checks/sizes.h"
#include "api/checks/validate.h"
#include "api/checks/visibility.h"
#include "api/program.h"

namespace flash_attention::api {
namespace {

void check_dtype(const char* argument, Dtype got) {
  require(got == Dtype::float32 || got == Dtype::float16 || got == Dtype::bfloat16, argument,
          static_cast<std::int64_t>(got), "allowed are float32, float16 and bfloat16");
}

void check_head_dim(const char* argument, std::int64_t got) {
  if (got >= 1 && got <= max_head_dim) return;
  refuse(argument, std::to_string(got), "allowed are 1 to " + std::to_string(max_head_dim));
}

/// A latent key has its value's columns, and none or some more.
void check_latent_dims(const Problem& p) {
  require(p.head_dim_v >= 8 && p.head_dim_v <= 512 && p.head_dim_v % 8 == 0, "head_dim_v", p.head_dim_v,
          "allowed are multiples of 8 from 8 to 512 where keys are latent");
  if (p.head_dim >= p.head_dim_v && p.head_dim <= 576 && p.head_dim % 8 == 0) return;
  refuse("head_dim", std::to_string(p.head_dim),
         "allowed are multiples of 8 from head_dim_v, " + std::to_string(p.head_dim_v) + ", to 576 where keys are latent");
}

void check_score_strides(const char* argument, const ScoreTensor& tensor, const Problem& p) {
  if (!tensor.present) return;
  check_reach(argument, tensor.batch_stride, p.batch);
  check_reach(argument, tensor.head_stride, p.heads_q);
  check_reach(argument, tensor.q_stride, p.seq_q);
}

void check_hidden_rows(HiddenRows& hidden, const Problem& p) {
  require(hidden.bounds == 0 || hidden.bounds == 1 || hidden.bounds == 2 || hidden.bounds == 4, "hidden_rows.bounds",
          std::int64_t{hidden.bounds}, "allowed are 0 (none), 1, 2 and 4");
  if (hidden.bounds == 0) {
    hidden = {};
    return;
  }
  if (p.packed && p.page_size == 0) hidden.batch_stride = 0;
  check_reach("hidden_rows.batch_stride", hidden.batch_stride, p.batch);
  check_reach("hidden_rows.head_stride", hidden.head_stride, p.heads_kv);
}

void check_block_mask(BlockMask& mask, const Problem& p) {
  check_size("block_mask.block_q", mask.block_q, 0);
  if (mask.block_q == 0) {
    mask = {};
    return;
  }
  check_size("block_mask.block_kv", mask.block_kv, 1);
  check_reach("block_mask.batch_stride", mask.batch_stride, p.batch);
  check_reach("block_mask.head_stride", mask.head_stride, p.heads_q);
  check_reach("block_mask.q_stride", mask.q_stride, (p.seq_q + mask.block_q - 1) / mask.block_q);
}

void check_sizes(const Problem& p) {
  check_size("batch", p.batch, 0);
  check_size("seq_q", p.seq_q, 0);
  check_size("seq_kv", p.seq_kv, 0);
  check_size("heads_q", p.heads_q, 1);
  check_size("heads_kv", p.heads_kv, 1);
  if (p.heads_q % p.heads_kv != 0) {
    refuse("heads_q", std::to_string(p.heads_q), "allowed are multiples of heads_kv, " + std::to_string(p.heads_kv));
  }
  check_size("batch * heads_q", p.batch * p.heads_q, 0);
  if (p.latent) {
    check_latent_dims(p);
  } else {
    check_head_dim("head_dim", p.head_dim);
    check_head_dim("head_dim_v", p.head_dim_v);
  }
  check_dtype("dtype", p.dtype);
  check_size("total_q", p.packed ? p.total_q : p.batch * p.seq_q, 0);
  if (p.page_size == 0) check_size("total_kv", p.packed ? p.total_kv : p.batch * p.seq_kv, 0);
}

void check_options(const Problem& p) {
  require(std::isfinite(*p.scale), "scale", *p.scale, "it must be finite");
  const bool capped = std::isfinite(p.softcap) && p.softcap >= std::numeric_limits<float>::min();  // 1 / softcap is finite
  require(capped || p.softcap == 0, "softcap", p.softcap, "allowed are 0 (off) and positive normal numbers");
  require(p.dropout_p >= 0 && p.dropout_p < 1, "dropout_p", p.dropout_p, "allowed is [0, 1)");
  require(p.window_left >= -1, "window_left", p.window_left, "allowed are -1 (no bound) and up");
  require(p.window_right >= -1, "window_right", p.window_right, "allowed are -1 (no bound) and up");
  require(p.attention_chunk >= 0, "attention_chunk", p.attention_chunk, "allowed are 0 (none) and up");
  require(p.precision <= Precision::tf32, "precision", static_cast<std::int64_t>(p.precision),
          "allowed are ieee, fast, automatic and tf32");
  require(p.alignment == Alignment::bottom_right || p.alignment == Alignment::top_left, "alignment",
          static_cast<std::int64_t>(p.alignment), "allowed are bottom_right and top_left");
  if (p.bias.present) check_dtype("bias.dtype", p.bias.dtype);
}

bool is_of_tangents(Pass pass) { return pass == Pass::tangent || pass == Pass::second; }

/// Checks K and V in pages, and the other options of a cache. None of them has gradients.
void check_cache(Problem& p, Pass pass) {
  const bool forward = pass == Pass::forward;
  require(forward || !p.left_padding, "left_padding", std::int64_t{1}, "only forward takes it");
  require(forward || !p.latent, "latent", std::int64_t{1}, "only forward takes latent keys");
  check_size("page_size", p.page_size, 0);
  if (p.page_size == 0) {
    require(p.num_pages == 0, "num_pages", p.num_pages, "it belongs to pages, and page_size is 0");
    require(p.page_table_stride == 0, "page_table_stride", p.page_table_stride, "it belongs to pages, and page_size is 0");
    return;
  }
  require(forward, "page_size", p.page_size, "only forward takes pages");
  check_size("num_pages", p.num_pages, p.batch > 0 && p.seq_kv > 0 ? 1 : 0);
  check_size("num_pages * page_size", p.num_pages * p.page_size, 0);
  const std::int64_t needed = (p.seq_kv + p.page_size - 1) / p.page_size;
  if (p.page_table_stride == 0) p.page_table_stride = needed;
  if (p.page_table_stride < needed) {
    refuse("page_table_stride", std::to_string(p.page_table_stride),
           std::to_string(p.seq_kv) + " keys need " + std::to_string(needed) + " pages of " + std::to_string(p.page_size));
  }
  check_reach("page_table_stride", p.page_table_stride, p.batch);
  require(!p.packed || p.seqused_kv, "seqused_kv", std::int64_t{0}, "packed queries with pages need it");
}

/// Statistics need keys and values in rows, in the type of the other tensors.
void check_statistics(Problem& p, Pass pass) {
  const bool backward = pass == Pass::backward || pass == Pass::standard_backward;
  if (backward) p.return_max_logit = false;  // it has no gradient
  const auto check = [&](const char* argument, bool present) {
    if (!present) return;
    if (is_of_tangents(pass)) refuse(argument, "true", "statistics have no tangents and no second derivatives");
    if (p.page_size != 0) refuse(argument, "true", "K and V in pages have no statistics");
    if (p.latent) refuse(argument, "true", "latent keys have no statistics");
    if (p.key_list.kind != KeyListKind::none) refuse(argument, "true", "lists of keys have no statistics");
    if (*p.kv_dtype != p.dtype || *p.q_dtype != p.dtype) refuse(argument, "true", "tensors of 8 bits have no statistics");
  };
  check("return_max_logit", p.return_max_logit);
  check("return_key_mass", p.return_key_mass);
  check("return_entropy", p.return_entropy);
}

}  // namespace

Problem normalise(const Problem& problem, Pass pass) {
  Problem p = problem;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  check_sizes(p);
  if (p.packed) {
    // No sequence is longer than the total. A bias keeps the sizes that the caller gave.
    const bool rows = p.total_q != 0 || (p.page_size == 0 && p.total_kv != 0);
    require(p.batch > 0 || !rows, "batch", p.batch, "packed rows need a sequence, or there must be none");
    if (p.seq_q == 0 || (p.seq_q > p.total_q && !p.bias.present)) p.seq_q = p.total_q;
    if (p.page_size == 0 && (p.seq_kv == 0 || (p.seq_kv > p.total_kv && !p.bias.present))) p.seq_kv = p.total_kv;
  } else {
    require(p.total_q == 0 || p.total_q == p.batch * p.seq_q, "total_q", p.total_q, "it belongs to packed problems");
  }
  check_cache(p, pass);
  if (p.page_size != 0) {
    require(p.total_kv == 0 || p.total_kv == p.num_pages * p.page_size, "total_kv", p.total_kv,
            "it belongs to packed keys, and these are in pages");
    p.total_kv = p.num_pages * p.page_size;
  } else if (!p.packed) {
    require(p.total_kv == 0 || p.total_kv == p.batch * p.seq_kv, "total_kv", p.total_kv, "it belongs to packed problems");
  }
  if (p.causal) p.window_right = 0;
  if (p.invariant) p.deterministic = true;
  if (!p.scale) p.scale = p.head_dim > 0 ? 1.0f / std::sqrt(static_cast<float>(p.head_dim)) : 1.0f;
  check_options(p);
  if (p.dtype != Dtype::float32) p.precision = Precision::automatic;
  choose_window(p);

  const RowAxes of_q{p.packed, p.batch, p.packed ? p.total_q : p.seq_q};
  const RowAxes of_kv = p.page_size != 0 ? RowAxes{false, p.num_pages, p.page_size}
                                         : RowAxes{p.packed, p.batch, p.packed ? p.total_kv : p.seq_kv};
  check_narrow_keys(p, pass, of_kv);
  check_narrow_queries(p, pass);
  check_statistics(p, pass);
  p.q_strides = resolve("q_strides", p.q_strides, of_q, p.heads_q, p.head_dim);
  const auto columns = [&](std::int64_t dim) { return stored_columns(*p.kv_dtype, dim); };
  p.k_strides = resolve("k_strides", p.k_strides, of_kv, p.heads_kv, columns(p.head_dim - (p.latent ? p.head_dim_v : 0)));
  p.v_strides = resolve("v_strides", p.v_strides, of_kv, p.heads_kv, columns(p.head_dim_v));
  p.out_strides = resolve("out_strides", p.out_strides, of_q, p.heads_q, p.head_dim_v);
  p.dout_strides = resolve("dout_strides", p.dout_strides, of_q, p.heads_q, p.head_dim_v);
  p.dq_strides = resolve("dq_strides", p.dq_strides, of_q, p.heads_q, p.head_dim);
  p.dk_strides = resolve("dk_strides", p.dk_strides, of_kv, p.heads_kv, p.head_dim);
  p.dv_strides = resolve("dv_strides", p.dv_strides, of_kv, p.heads_kv, p.head_dim_v);

  check_score_strides("bias strides", p.bias, p);
  check_score_strides("mask strides", p.mask, p);
  check_hidden_rows(p.hidden_rows, p);
  check_block_mask(p.block_mask, p);
  if (p.alibi) check_reach("alibi_batch_stride", p.alibi_batch_stride, p.batch);

  const std::int64_t batches = p.packed ? 1 : p.batch;
  const bool writes_out = pass == Pass::forward || pass == Pass::standard_forward || pass == Pass::tangent;
  if (writes_out || pass == Pass::second) {
    refuse_self_overlap("out_strides", p.out_strides, batches, of_q.seq, p.heads_q, p.head_dim_v);
  }
  if (writes_out) {
    p.dout_strides = p.dq_strides = p.dk_strides = p.dv_strides = Strides{0, 0, 0};  // one plan for all strides
  } else {
    refuse_self_overlap("dq_strides", p.dq_strides, batches, of_q.seq, p.heads_q, p.head_dim);
    refuse_self_overlap("dk_strides", p.dk_strides, batches, of_kv.seq, p.heads_kv, p.head_dim);
    refuse_self_overlap("dv_strides", p.dv_strides, batches, of_kv.seq, p.heads_kv, p.head_dim_v);
  }
  check_key_list(p, pass);
  check_bit_mask(p, pass);
  check_program(p, pass);
  take_window_of_program(p);
  take_options_of_program(p);
  if (!p.packed) p.total_q = p.batch * p.seq_q;
  if (!p.packed && p.page_size == 0) p.total_kv = p.batch * p.seq_kv;
  return p;
}

}  // namespace flash_attention::api
