#include "api/checks/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "api/backends.h"
#include "api/checks/overlap.h"
#include "api/checks/pointers.h"
#include "api/checks/refuse.h"
#include "api/program.h"
#include "plan/masks.h"

namespace flash_attention::api {
namespace {

bool is_backward(Pass pass) { return pass == Pass::backward || pass == Pass::standard_backward; }

bool has_no_scores(const Problem& p) { return p.total_q == 0 || p.total_kv == 0 || p.seq_kv == 0; }

/// What hides keys, but for programs.
void check_masks(const Problem& p, const Buffers& b) {
  const bool no_scores = has_no_scores(p);
  check_pair("mask", b.mask, p.mask.present, "mask.present", 1, no_scores);
  check_pair("hidden_rows", b.hidden_rows, p.hidden_rows.bounds != 0, "hidden_rows.bounds", 4, no_scores);
  check_pair("block_mask", b.block_mask, p.block_mask.block_q != 0, "block_mask.block_q", 1, no_scores);
  const bool no_entries = no_scores || p.key_list.entries == 0;
  check_pair("key_list", b.key_list, p.key_list.kind != KeyListKind::none, "key_list.kind", 4, no_entries);
  check_pair("key_counts", b.key_counts, p.key_list.counts, "key_list.counts", 4, no_scores);
  check_pair("cu_seqlens_q", b.cu_seqlens_q, p.packed, "packed", 4);
  check_pair("cu_seqlens_kv", b.cu_seqlens_kv, p.packed && p.page_size == 0, "packed and not page_size", 4);
}

void check_statistics(const Problem& p, Pass pass, const Buffers& b) {
  const bool rows = p.total_q > 0, keys = p.total_kv > 0 && p.batch > 0;
  const bool backward = is_backward(pass);
  check_pair("entropy", b.entropy, p.return_entropy, "return_entropy", 4, !rows);
  if (backward) {
    check_pair("dentropy", b.dentropy, p.return_entropy, "return_entropy", 4, !rows);
    check_pair("dkey_mass", b.dkey_mass, p.return_key_mass, "return_key_mass", 4, !keys);
    return;
  }
  check_pair("max_logit", b.max_logit, p.return_max_logit, "return_max_logit", 4, p.batch == 0);
  check_pair("key_mass", b.key_mass, p.return_key_mass, "return_key_mass", 4, !keys);
}

void check_pointers(const Problem& p, Pass pass, const Buffers& b, Device device) {
  // Which kernel runs is decided before the pointers are known.
  const Backend& backend = backend_of(device);
  const std::size_t wide = backend.alignment(size_of(p.dtype));
  const bool queries = p.total_q > 0, keys = p.total_kv > 0;
  check_pointer("q", b.q, queries, backend.alignment(size_of(*p.q_dtype)));
  const std::size_t of_keys = backend.alignment(size_of(*p.kv_dtype));
  const bool values_alone = p.latent && p.head_dim == p.head_dim_v;  // k has no columns
  check_pointer("k", b.k, keys && !values_alone, of_keys);
  check_pointer("v", b.v, keys, of_keys);
  const bool no_batch = p.batch == 0;  // though a cache may have keys
  const auto no_scale = [&](ScaleKind kind) { return !keys || (kind == ScaleKind::head && no_batch); };
  check_pair("k_scale", b.k_scale, p.kv_scales != ScaleKind::none, "kv_scales", 4, no_scale(p.kv_scales));
  check_pair("v_scale", b.v_scale, p.kv_scales != ScaleKind::none, "kv_scales", 4, no_scale(p.kv_scales));
  check_pair("q_scale", b.q_scale, p.q_scales != ScaleKind::none, "q_scales", 4, no_scale(p.q_scales));
  check_pointer("out", b.out, queries, wide);
  check_pointer("lse", b.lse, queries && (is_backward(pass) || p.return_key_mass), 4);

  check_pair("bias", b.bias, p.bias.present, "bias.present", size_of(p.bias.dtype), has_no_scores(p));
  check_masks(p, b);
  check_pair("alibi_slopes", b.alibi_slopes, p.alibi, "alibi", 4, no_batch && p.alibi_batch_stride != 0);
  check_pair("sink", b.sink, p.sink, "sink", 4);
  check_pair("seqused_q", b.seqused_q, p.seqused_q, "seqused_q", 4, no_batch);
  check_pair("seqused_kv", b.seqused_kv, p.seqused_kv, "seqused_kv", 4, no_batch);
  check_pair("key_lengths", b.key_lengths, p.key_lengths, "key_lengths", 4, no_batch);
  check_pair("left_padding", b.left_padding, p.left_padding, "left_padding", 4, no_batch);
  check_pair("page_table", b.page_table, p.page_size != 0, "page_size", 4, no_batch || p.seq_kv == 0);

  check_program_pointers(p, pass, b);
  if (b.row_max != nullptr && (p.key_list.kind == KeyListKind::none || is_backward(pass)))
    refuse("row_max", address(b.row_max), "forward over lists of keys has it, and nothing else");
  check_pointer("row_max", b.row_max, false, 4);
  check_statistics(p, pass, b);

  if (!is_backward(pass)) return;
  check_pointer("dout", b.dout, queries, wide);
  check_pointer("dlse", b.dlse, false, 4);
  check_pointer("dq", b.dq, queries, wide);
  check_pointer("dk", b.dk, keys, wide);
  check_pointer("dv", b.dv, keys, wide);
  if (b.dbias != nullptr && !p.bias.present) refuse("dbias", address(b.dbias), "there is no bias to differentiate");
  if (b.dbias != nullptr && p.key_list.kind != KeyListKind::none)
    refuse("dbias", address(b.dbias), "a bias has no gradient where keys are listed");
  check_pointer("dbias", b.dbias, false, size_of(p.bias.dtype));
  if (b.dsink != nullptr && !p.sink) refuse("dsink", address(b.dsink), "there is no sink to differentiate");
  check_pointer("dsink", b.dsink, false, 4);
}

void check_lengths(const char* argument, const std::int32_t* lengths, const std::int32_t* cu, std::int64_t batch,
                   std::int64_t longest) {
  if (lengths == nullptr) return;
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t limit = cu ? std::int64_t{cu[i + 1]} - cu[i] : longest;
    if (lengths[i] >= 0 && lengths[i] <= limit) continue;
    refuse(std::string(argument) + "[" + std::to_string(i) + "]", std::to_string(lengths[i]),
           "allowed are 0 to " + std::to_string(limit));
  }
}

/// The entries of the keys in use; what is past them may be anything.
void check_page_table(const Problem& p, const Buffers& b) {
  if (p.page_size == 0) return;
  for (std::int64_t i = 0; i < p.batch; ++i) {
    const std::int64_t keys = b.seqused_kv != nullptr ? b.seqused_kv[i] : p.seq_kv;
    for (std::int64_t page = 0; page * p.page_size < keys; ++page) {
      const std::int64_t got = b.page_table[i * p.page_table_stride + page];
      if (got >= 0 && got < p.num_pages) continue;
      refuse("page_table[" + std::to_string(i) + "][" + std::to_string(page) + "]", std::to_string(got),
             "allowed are 0 to " + std::to_string(p.num_pages - 1) + " for the " + std::to_string(keys) + " keys in use");
    }
  }
}

/// Scales of the whole and of heads. Those of rows are left to the call: there may be as many as keys.
void check_scales(const Problem& p, const char* argument, ScaleKind kind, const float* scales, const Strides& s) {
  if (kind == ScaleKind::none || kind == ScaleKind::token || scales == nullptr) return;
  const bool one = kind == ScaleKind::tensor;
  for (std::int64_t i = 0; i < (one ? 1 : p.batch); ++i) {
    for (std::int64_t head = 0; head < (one ? 1 : p.heads_kv); ++head) {
      const float got = scales[i * s.batch + head * s.head];
      if (std::isfinite(got) && got > 0) continue;
      refuse(std::string(argument) + (one ? "" : "[" + std::to_string(i) + "][" + std::to_string(head) + "]"),
             std::to_string(got), "allowed are positive finite numbers");
    }
  }
}

void check_host_lengths(const Problem& p, const Buffers& b) {
  check_scales(p, "q_scale", p.q_scales, b.q_scale, p.q_scale_strides);
  check_scales(p, "k_scale", p.kv_scales, b.k_scale, p.k_scale_strides);
  check_scales(p, "v_scale", p.kv_scales, b.v_scale, p.v_scale_strides);
  if (p.packed) check_cu_seqlens("cu_seqlens_q", b.cu_seqlens_q, p.batch, p.total_q, p.seq_q);
  if (b.cu_seqlens_kv != nullptr) {
    check_cu_seqlens("cu_seqlens_kv", b.cu_seqlens_kv, p.batch, p.total_kv, p.seq_kv);
  }
  check_lengths("seqused_q", b.seqused_q, b.cu_seqlens_q, p.batch, p.seq_q);
  check_lengths("seqused_kv", b.seqused_kv, b.cu_seqlens_kv, p.batch, p.seq_kv);
  check_lengths("key_lengths", b.key_lengths, b.cu_seqlens_kv, p.batch, p.seq_kv);
  check_lengths("left_padding", b.left_padding, b.cu_seqlens_kv, p.batch, p.seq_kv);
  check_page_table(p, b);
}

Extent scores(const char* name, const void* data, const ScoreTensor& t, const Problem& p, std::size_t element_bytes) {
  return {name,
          static_cast<const char*>(data),
          static_cast<std::int64_t>(element_bytes),
          {p.batch, p.heads_q, p.seq_q, p.seq_kv},
          {t.batch_stride, t.head_stride, t.q_stride, 1}};
}

Extent dense(const char* name, const void* data, std::size_t element_bytes, std::int64_t elements) {
  return {
      name, static_cast<const char*>(data), static_cast<std::int64_t>(element_bytes), {1, 1, 1, elements}, {0, 0, 0, 1}};
}

void check_overlap(const Problem& p, const Plan& plan, const Buffers& b, const Options& options) {
  const auto view = [&](const char* name, const void* data, const Strides& strides, std::array<std::int64_t, 2> rows,
                        std::int64_t heads, std::int64_t dim) {
    return Extent{name,
                  static_cast<const char*>(data),
                  static_cast<std::int64_t>(size_of(p.dtype)),
                  {rows[0], rows[1], heads, dim},
                  {strides.batch, strides.seq, strides.head, 1}};
  };
  using Axes = std::array<std::int64_t, 2>;
  const Axes rows_q = p.packed ? Axes{1, p.total_q} : Axes{p.batch, p.seq_q};
  const Axes rows_kv = p.page_size != 0 ? Axes{p.num_pages, p.page_size}
                       : p.packed       ? Axes{1, p.total_kv}
                                        : Axes{p.batch, p.seq_kv};
  Extent q = view("q", b.q, p.q_strides, rows_q, p.heads_q, p.head_dim);
  q.element_bytes = static_cast<std::int64_t>(size_of(*p.q_dtype));
  Extent k = view("k", b.k, p.k_strides, rows_kv, p.heads_kv, p.head_dim - (p.latent ? p.head_dim_v : 0));
  Extent v = view("v", b.v, p.v_strides, rows_kv, p.heads_kv, p.head_dim_v);
  k.element_bytes = v.element_bytes = static_cast<std::int64_t>(size_of(*p.kv_dtype));
  const Extent out = view("out", b.out, p.out_strides, rows_q, p.heads_q, p.head_dim_v);
  const Extent lse = dense("lse", b.lse, 4, p.total_q * p.heads_q);
  const Extent row_max = dense("row_max", b.row_max, 4, p.total_q * p.heads_q);
  const Extent bias = scores("bias", b.bias, p.bias, p, size_of(p.bias.dtype));
  const Extent mask = scores("mask", b.mask, p.mask, p, 1);
  const bool flat_keys = p.packed && p.page_size == 0;
  const Extent hidden{"hidden_rows",
                      reinterpret_cast<const char*>(b.hidden_rows),
                      4,
                      {flat_keys ? 1 : p.batch, p.heads_kv, flat_keys ? p.total_kv : p.seq_kv, p.hidden_rows.bounds},
                      {p.hidden_rows.batch_stride, p.hidden_rows.head_stride, p.hidden_rows.bounds, 1}};
  const auto blocks = [](std::int64_t rows, std::int64_t block) { return block == 0 ? 0 : (rows + block - 1) / block; };
  const Extent block_mask{
      "block_mask",
      reinterpret_cast<const char*>(b.block_mask),
      1,
      {p.batch, p.heads_q, blocks(p.seq_q, p.block_mask.block_q), blocks(p.seq_kv, p.block_mask.block_kv)},
      {p.block_mask.batch_stride, p.block_mask.head_stride, p.block_mask.q_stride, 1}};
  const std::int64_t lists = (p.packed ? p.total_q : p.batch * blocks(p.seq_q, p.key_list.block_q)) * p.key_list.heads;
  const Extent key_list = dense("key_list", b.key_list, 4, lists * p.key_list.entries);
  const Extent key_counts = dense("key_counts", b.key_counts, 4, lists);
  const Extent table = dense("page_table", p.seq_kv > 0 ? b.page_table : nullptr, 4, p.batch * p.page_table_stride);
  const Extent slopes{"alibi_slopes",
                      reinterpret_cast<const char*>(b.alibi_slopes),
                      4,
                      {1, 1, p.batch, p.heads_q},
                      {0, 0, p.alibi_batch_stride, 1}};
  const Extent sink = dense("sink", b.sink, 4, p.heads_q);
  const Extent cu_q = dense("cu_seqlens_q", b.cu_seqlens_q, 4, p.batch + 1);
  const Extent cu_kv = dense("cu_seqlens_kv", b.cu_seqlens_kv, 4, p.batch + 1);
  const Extent used_q = dense("seqused_q", b.seqused_q, 4, p.batch),
               used_kv = dense("seqused_kv", b.seqused_kv, 4, p.batch);
  const Extent lengths = dense("key_lengths", b.key_lengths, 4, p.batch);
  const Extent padding = dense("left_padding", b.left_padding, 4, p.batch);
  const std::size_t needed = plan::needed_workspace(plan, options.prepared_mask);
  const Extent workspace = dense("workspace", options.workspace, 1, static_cast<std::int64_t>(needed));
  const Extent prepared =
      dense("prepared_mask", options.prepared_mask.data, 1, static_cast<std::int64_t>(plan::prepared_bytes(plan)));
  const Extent entropy = dense("entropy", b.entropy, 4, p.total_q * p.heads_q);
  const std::int64_t masses = p.packed ? p.total_kv : p.batch * p.seq_kv;
  if (!is_backward(plan.pass)) {
    const Extent max_logit = dense("max_logit", b.max_logit, 4, p.batch * p.heads_q);
    const Extent key_mass = dense("key_mass", b.key_mass, 4, masses * p.heads_q);
    refuse_overlap({out, lse, row_max, max_logit, key_mass, entropy, workspace},
                   {q, k, v, bias, mask, hidden, block_mask, table, slopes, sink, cu_q, cu_kv, used_q, used_kv, lengths,
                    padding, prepared, key_list, key_counts});
    return;
  }
  const Extent dout = view("dout", b.dout, p.dout_strides, rows_q, p.heads_q, p.head_dim_v);
  const Extent dq = view("dq", b.dq, p.dq_strides, rows_q, p.heads_q, p.head_dim);
  const Extent dk = view("dk", b.dk, p.dk_strides, rows_kv, p.heads_kv, p.head_dim);
  const Extent dv = view("dv", b.dv, p.dv_strides, rows_kv, p.heads_kv, p.head_dim_v);
  const Extent dlse = dense("dlse", b.dlse, 4, p.total_q * p.heads_q);
  const auto axis = [](std::int64_t stride, std::int64_t size) {
    return stride == 0 ? std::min<std::int64_t>(size, 1) : size;
  };
  const Extent dbias = dense(
      "dbias", b.dbias, size_of(p.bias.dtype),
      axis(p.bias.batch_stride, p.batch) * axis(p.bias.head_stride, p.heads_q) * axis(p.bias.q_stride, p.seq_q) * p.seq_kv);
  const Extent dsink = dense("dsink", b.dsink, 4, p.heads_q);
  const Extent dkey_mass = dense("dkey_mass", b.dkey_mass, 4, masses * p.heads_q);
  const Extent dentropy = dense("dentropy", b.dentropy, 4, p.total_q * p.heads_q);
  refuse_overlap({dq, dk, dv, dbias, dsink, workspace},
                 {q,      k,    v,    out,   lse,    dout,    dlse,    bias,    mask,     hidden,   block_mask, entropy, dentropy,
                  slopes, sink, cu_q, cu_kv, used_q, used_kv, lengths, padding, prepared, key_list, key_counts, dkey_mass});
}

void check_stream(const Options& options) {
  if (device_traits(options.device).streams || options.stream == nullptr) return;
  refuse("stream", address(options.stream), "only CUDA devices have streams; the device is " + to_string(options.device));
}

}  // namespace

void validate(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) {
  check_stream(options);
  check_pointers(problem, plan.pass, buffers, options.device);
  if (device_traits(options.device).host_memory) check_host_lengths(problem, buffers);
  if (const std::size_t needed = plan::needed_workspace(plan, options.prepared_mask); needed != 0) {
    if (options.workspace == nullptr || options.workspace_bytes < needed) {
      refuse("workspace_bytes", std::to_string(options.workspace == nullptr ? 0 : options.workspace_bytes),
             plan.kernel + " needs " + std::to_string(needed) + " (ask workspace_bytes())");
    }
    check_pointer("workspace", options.workspace, true, 256);
  }
  check_overlap(problem, plan, buffers, options);
}

void validate_preparation(const Problem& problem, const Plan& plan, const Buffers& buffers, const void* memory,
                          std::size_t bytes, const Options& options) {
  check_stream(options);
  check_masks(problem, buffers);
  check_program_pointers(problem, Pass::forward, buffers);
  const std::size_t needed = plan::prepared_bytes(plan);
  if (bytes < needed) {
    refuse("bytes", std::to_string(bytes),
           "the masks of " + plan.kernel + " need " + std::to_string(needed) + " (ask mask_preparation())");
  }
  check_pointer("memory", memory, needed != 0, 256);
}

}  // namespace flash_attention::api
