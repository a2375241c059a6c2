#include "api/checks/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "api/backends.h"
#include "api/checks/overlap.h"
#include "api/checks/pointers.h"
#include "api/checks/refuse.h"
#include "api/checks/visibility.h"
#include "api/program.h"
#include "plan/masks.h"

namespace flash_attention::api {
namespace {

bool is_backward(Pass pass) { return pass == Pass::backward || pass == Pass::standard_backward || pass == Pass::second; }
bool has_tangents(Pass pass) { return pass == Pass::tangent || pass == Pass::second; }

bool has_no_scores(const Problem& p) { return p.total_q == 0 || p.total_kv == 0 || p.seq_kv == 0; }

/// Checks the masks, except programs.
void check_masks(const Problem& p, const Buffers& b) {
  const bool no_scores = has_no_scores(p);
  check_pair("mask", b.mask, p.mask.present, "mask.present", 1, no_scores);
  check_pair("hidden_rows", b.hidden_rows, p.hidden_rows.bounds != 0, "hidden_rows.bounds", 4, no_scores);
  check_pair("block_mask", b.block_mask, p.block_mask.block_q != 0, "block_mask.block_q", 1, no_scores);
  const bool no_entries = no_scores || p.key_list.entries == 0;
  check_pair("key_list", b.key_list, p.key_list.kind != KeyListKind::none, "key_list.kind", 4, no_entries);
  check_pair("key_counts", b.key_counts, p.key_list.counts, "key_list.counts", 4, no_scores);
  const bool no_bits = no_scores || p.bit_mask.offsets;  // a sequence need not have any
  check_pair("bit_mask", b.bit_mask, p.bit_mask.kind != BitMaskKind::none, "bit_mask.kind", 1, no_bits);
  check_pair("bit_mask_offsets", b.bit_mask_offsets, p.bit_mask.offsets, "bit_mask.offsets", 4);
  check_pair("sequence_windows", b.sequence_windows, p.sequence_windows, "sequence_windows", 4, p.batch == 0);
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

void check_tangents(const Problem& p, Pass pass, const Buffers& b, std::size_t wide) {
  const std::array<std::pair<const char*, const void*>, 7> given{{{"q_tangent", b.q_tangent},
                                                                  {"k_tangent", b.k_tangent},
                                                                  {"v_tangent", b.v_tangent},
                                                                  {"out_tangent", b.out_tangent},
                                                                  {"bias_tangent", b.bias_tangent},
                                                                  {"sink_tangent", b.sink_tangent},
                                                                  {"lse_tangent", b.lse_tangent}}};
  const bool takes = has_tangents(pass);
  for (const auto& [name, data] : given) {
    if (data != nullptr && !takes) refuse(name, address(data), "tangent() and second() take it, and nothing else");
  }
  if (!takes) return;
  for (std::size_t i = 0; i < 4; ++i) check_pointer(given[i].first, given[i].second, false, wide);
  check_pointer("bias_tangent", b.bias_tangent, false, size_of(p.bias.dtype));
  check_pointer("sink_tangent", b.sink_tangent, false, 4);
  check_pointer("lse_tangent", b.lse_tangent, false, 4);
  if (b.bias_tangent != nullptr && !p.bias.present) refuse("bias_tangent", address(b.bias_tangent), "there is no bias");
  if (b.sink_tangent != nullptr && !p.sink) refuse("sink_tangent", address(b.sink_tangent), "there is no sink");
}

void check_pointers(const Problem& p, Pass pass, const Buffers& b, Device device) {
  // The kernel is chosen before the pointers are known.
  const Backend& backend = backend_of(device);
  const std::size_t wide = backend.alignment(size_of(p.dtype));
  const bool queries = p.total_q > 0, keys = p.total_kv > 0;
  check_pointer("q", b.q, queries, backend.alignment(size_of(*p.q_dtype)));
  const std::size_t of_keys = backend.alignment(size_of(*p.kv_dtype));
  const bool values_alone = p.latent && p.head_dim == p.head_dim_v;  // k has no columns
  check_pointer("k", b.k, keys && !values_alone, of_keys);
  check_pointer("v", b.v, keys, of_keys);
  const bool no_batch = p.batch == 0;  // but a cache may still have keys
  const auto no_scale = [&](ScaleKind kind) { return !keys || (kind == ScaleKind::head && no_batch); };
  check_pair("k_scale", b.k_scale, p.kv_scales != ScaleKind::none, "kv_scales", 4, no_scale(p.kv_scales));
  check_pair("v_scale", b.v_scale, p.kv_scales != ScaleKind::none, "kv_scales", 4, no_scale(p.kv_scales));
  check_pair("q_scale", b.q_scale, p.q_scales != ScaleKind::none, "q_scales", 4, no_scale(p.q_scales));
  const bool zeros = *p.kv_dtype == Dtype::int4;
  const auto of_groups = [&](const char* name, const void* data, bool present) {
    check_pair(name, data, present, "kv_dtype", backend.alignment(zeros ? size_of(p.dtype) : 1), !keys);
  };
  of_groups("k_group_scale", b.k_group_scale, p.kv_group != 0);
  of_groups("v_group_scale", b.v_group_scale, p.kv_group != 0);
  of_groups("k_group_zero", b.k_group_zero, zeros);
  of_groups("v_group_zero", b.v_group_zero, zeros);
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
  if (b.row_max != nullptr && (p.key_list.kind != KeyListKind::keys || is_backward(pass)))
    refuse("row_max", address(b.row_max), "forward over lists of keys has it, and nothing else (lists of blocks have not)");
  check_pointer("row_max", b.row_max, false, 4);
  check_statistics(p, pass, b);
  check_tangents(p, pass, b, wide);

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

/// Checks the entries of keys in use. Later entries may be anything.
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

/// Checks scales of a tensor and of heads. Scales of rows are not checked: there may be as many as keys.
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
  check_bit_mask_offsets(p, b);
}

/// Collects the memory of a call, one argument at a time. A null argument is skipped.
class Arguments {
 public:
  Arguments(const Problem& p, const Plan& plan, const Buffers& b, const Options& options)
      : p_(p), plan_(plan), b_(b), options_(options) {}

  void refuse_overlap() {
    is_backward(plan_.pass) ? add_backward() : add_forward();
    memory_.refuse_overlap();
  }

 private:
  using Axes = std::array<std::int64_t, 2>;

  void add(const Extent& extent) { writes_ ? memory_.output(extent) : memory_.input(extent); }

  /// A tensor [rows[0], rows[1], heads, dim]. `rows` are those of queries or of keys.
  void view(const char* name, const void* data, const Strides& s, Axes rows, std::int64_t heads, std::int64_t dim,
            Dtype dtype) {
    if (data == nullptr) return;
    add({name,
         static_cast<const char*>(data),
         static_cast<std::int64_t>(size_of(dtype)),
         {rows[0], rows[1], heads, dim},
         {s.batch, s.seq, s.head, 1}});
  }

  void scores(const char* name, const void* data, const ScoreTensor& t, std::size_t element_bytes) {
    if (data == nullptr) return;
    add({name,
         static_cast<const char*>(data),
         static_cast<std::int64_t>(element_bytes),
         {p_.batch, p_.heads_q, p_.seq_q, p_.seq_kv},
         {t.batch_stride, t.head_stride, t.q_stride, 1}});
  }

  void dense(const char* name, const void* data, std::size_t element_bytes, std::int64_t elements) {
    if (data == nullptr) return;
    add({name,
         static_cast<const char*>(data),
         static_cast<std::int64_t>(element_bytes),
         {1, 1, 1, elements},
         {0, 0, 0, 1}});
  }

  void add_forward() {
    add_results();
    dense("max_logit", b_.max_logit, 4, p_.batch * p_.heads_q);
    dense("key_mass", b_.key_mass, 4, masses());
    dense("entropy", b_.entropy, 4, rows());
    add_tangents_of_results();
    add_workspace();
    writes_ = false;
    add_inputs();
  }

  void add_backward() {
    view("dq", b_.dq, p_.dq_strides, rows_q_, p_.heads_q, p_.head_dim, p_.dtype);
    view("dk", b_.dk, p_.dk_strides, rows_kv_, p_.heads_kv, p_.head_dim, p_.dtype);
    view("dv", b_.dv, p_.dv_strides, rows_kv_, p_.heads_kv, p_.head_dim_v, p_.dtype);
    const auto axis = [](std::int64_t stride, std::int64_t size) {
      return stride == 0 ? std::min<std::int64_t>(size, 1) : size;
    };
    dense("dbias", b_.dbias, size_of(p_.bias.dtype),
          axis(p_.bias.batch_stride, p_.batch) * axis(p_.bias.head_stride, p_.heads_q) * axis(p_.bias.q_stride, p_.seq_q) *
              p_.seq_kv);
    dense("dsink", b_.dsink, 4, p_.heads_q);
    add_tangents_of_results();
    add_workspace();
    writes_ = false;
    add_inputs();
    add_results();
    view("dout", b_.dout, p_.dout_strides, rows_q_, p_.heads_q, p_.head_dim_v, p_.dtype);
    dense("dlse", b_.dlse, 4, rows());
    dense("entropy", b_.entropy, 4, rows());
    dense("dentropy", b_.dentropy, 4, rows());
    dense("dkey_mass", b_.dkey_mass, 4, masses());
  }

  void add_results() {
    view("out", b_.out, p_.out_strides, rows_q_, p_.heads_q, p_.head_dim_v, p_.dtype);
    dense("lse", b_.lse, 4, rows());
    dense("row_max", b_.row_max, 4, rows());
  }

  void add_tangents_of_results() {
    view("out_tangent", b_.out_tangent, p_.out_strides, rows_q_, p_.heads_q, p_.head_dim_v, p_.dtype);
    dense("lse_tangent", b_.lse_tangent, 4, rows());
  }

  void add_tangents() {
    if (!has_tangents(plan_.pass)) return;
    view("q_tangent", b_.q_tangent, p_.q_strides, rows_q_, p_.heads_q, p_.head_dim, p_.dtype);
    view("k_tangent", b_.k_tangent, p_.k_strides, rows_kv_, p_.heads_kv, p_.head_dim, p_.dtype);
    view("v_tangent", b_.v_tangent, p_.v_strides, rows_kv_, p_.heads_kv, p_.head_dim_v, p_.dtype);
    scores("bias_tangent", b_.bias_tangent, p_.bias, size_of(p_.bias.dtype));
    dense("sink_tangent", b_.sink_tangent, 4, p_.heads_q);
  }

  void add_workspace() {
    const std::size_t needed = plan::needed_workspace(plan_, options_.prepared_mask);
    dense("workspace", options_.workspace, 1, static_cast<std::int64_t>(needed));
  }

  void add_inputs() {
    view("q", b_.q, p_.q_strides, rows_q_, p_.heads_q, p_.head_dim, *p_.q_dtype);
    const std::int64_t key_columns = p_.head_dim - (p_.latent ? p_.head_dim_v : 0);
    const auto columns = [&](std::int64_t dim) { return stored_columns(*p_.kv_dtype, dim); };
    view("k", b_.k, p_.k_strides, rows_kv_, p_.heads_kv, columns(key_columns), *p_.kv_dtype);
    view("v", b_.v, p_.v_strides, rows_kv_, p_.heads_kv, columns(p_.head_dim_v), *p_.kv_dtype);
    add_groups();
    scores("bias", b_.bias, p_.bias, size_of(p_.bias.dtype));
    scores("mask", b_.mask, p_.mask, 1);
    add_masks();
    if (p_.seq_kv > 0) dense("page_table", b_.page_table, 4, p_.batch * p_.page_table_stride);
    if (b_.alibi_slopes != nullptr) {
      const auto* const slopes = reinterpret_cast<const char*>(b_.alibi_slopes);
      add({"alibi_slopes", slopes, 4, {1, 1, p_.batch, p_.heads_q}, {0, 0, p_.alibi_batch_stride, 1}});
    }
    dense("sink", b_.sink, 4, p_.heads_q);
    dense("cu_seqlens_q", b_.cu_seqlens_q, 4, p_.batch + 1);
    dense("cu_seqlens_kv", b_.cu_seqlens_kv, 4, p_.batch + 1);
    dense("seqused_q", b_.seqused_q, 4, p_.batch);
    dense("seqused_kv", b_.seqused_kv, 4, p_.batch);
    dense("key_lengths", b_.key_lengths, 4, p_.batch);
    dense("left_padding", b_.left_padding, 4, p_.batch);
    dense("prepared_mask", options_.prepared_mask.data, 1, static_cast<std::int64_t>(plan::prepared_bytes(plan_)));
    add_tangents();
  }

  void add_groups() {
    if (p_.kv_group == 0) return;
    const Dtype scales = *p_.kv_dtype == Dtype::int4 ? p_.dtype : Dtype::int8;  // of a byte
    const std::int64_t of_k = p_.head_dim / p_.kv_group, of_v = p_.head_dim_v / p_.kv_group;
    view("k_group_scale", b_.k_group_scale, p_.k_group_strides, rows_kv_, p_.heads_kv, of_k, scales);
    view("v_group_scale", b_.v_group_scale, p_.v_group_strides, rows_kv_, p_.heads_kv, of_v, scales);
    view("k_group_zero", b_.k_group_zero, p_.k_group_strides, rows_kv_, p_.heads_kv, of_k, scales);
    view("v_group_zero", b_.v_group_zero, p_.v_group_strides, rows_kv_, p_.heads_kv, of_v, scales);
  }

  void add_masks() {
    const auto blocks = [](std::int64_t rows, std::int64_t block) { return block == 0 ? 0 : (rows + block - 1) / block; };
    if (b_.hidden_rows != nullptr) {
      const bool flat = p_.packed && p_.page_size == 0;
      const auto& h = p_.hidden_rows;
      add({"hidden_rows",
           reinterpret_cast<const char*>(b_.hidden_rows),
           4,
           {flat ? 1 : p_.batch, p_.heads_kv, flat ? p_.total_kv : p_.seq_kv, h.bounds},
           {h.batch_stride, h.head_stride, h.bounds, 1}});
    }
    if (b_.block_mask != nullptr) {
      const auto& m = p_.block_mask;
      add({"block_mask",
           reinterpret_cast<const char*>(b_.block_mask),
           1,
           {p_.batch, p_.heads_q, blocks(p_.seq_q, m.block_q), blocks(p_.seq_kv, m.block_kv)},
           {m.batch_stride, m.head_stride, m.q_stride, 1}});
    }
    dense("bit_mask", b_.bit_mask, 1, p_.bit_mask.offsets ? 0 : p_.total_q * p_.bit_mask.row_bytes);
    dense("bit_mask_offsets", b_.bit_mask_offsets, 4, p_.batch + 1);
    dense("sequence_windows", b_.sequence_windows, 4, 2 * p_.batch);
    if (b_.key_list == nullptr && b_.key_counts == nullptr) return;
    const std::int64_t lists =
        (p_.packed ? p_.total_q : p_.batch * blocks(p_.seq_q, p_.key_list.block_q)) * p_.key_list.heads;
    dense("key_list", b_.key_list, 4, lists * p_.key_list.entries);
    dense("key_counts", b_.key_counts, 4, lists);
  }

  std::int64_t rows() const { return p_.total_q * p_.heads_q; }
  std::int64_t masses() const { return (p_.packed ? p_.total_kv : p_.batch * p_.seq_kv) * p_.heads_q; }

  const Problem& p_;
  const Plan& plan_;
  const Buffers& b_;
  const Options& options_;
  const Axes rows_q_ = p_.packed ? Axes{1, p_.total_q} : Axes{p_.batch, p_.seq_q};
  const Axes rows_kv_ = p_.page_size != 0 ? Axes{p_.num_pages, p_.page_size}
                        : p_.packed       ? Axes{1, p_.total_kv}
                                          : Axes{p_.batch, p_.seq_kv};
  Memory memory_;
  bool writes_ = true;
};

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
  Arguments(problem, plan, buffers, options).refuse_overlap();
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
