#include "call/call.h"

#include <algorithm>
#include <cstdio>

#include "checks.h"

namespace flash_attention::python {
namespace {

/// The length of the longest packed sequence; 0 if none has a row. Starts that go down are refused by validation.
std::int64_t longest(const std::int32_t* starts, std::int64_t batch) {
  std::int64_t most = 0;
  for (std::int64_t b = 0; starts != nullptr && b < batch; ++b) {
    most = std::max(most, std::int64_t{starts[b + 1]} - starts[b]);
  }
  return most;
}

/// The precision that the caller names, else that of q's library.
Precision precision_of(std::string_view name, const Tensor& q) {
  for (const Precision precision : {Precision::ieee, Precision::fast, Precision::tf32}) {
    if (name == to_string(precision)) return precision;
  }
  return q.precision;
}

/// An option that the problem has under the same name.
template <class T>
void copy_option(const T& given, T& field) {
  field = given;
}
void copy_option(const std::string&, Precision&) {}  // precision_of()

/// The tile of "NAME@QxKV"; none without the mark.
std::optional<TileSize> tile_of(const std::string& kernel) {
  const std::size_t mark = kernel.find('@');
  if (mark == std::string::npos) return std::nullopt;
  const std::string text = kernel.substr(mark + 1);
  TileSize tile;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%dx%d%c", &tile.block_q, &tile.block_kv, &rest) != 2) {
    refuse_value("tile", "got '" + text + "', allowed: queries and keys, such as 128x64");
  }
  return tile;
}

}  // namespace

Call::Call(const Slots& tensors, const CallOptions& given, const std::string& codes, bool latent)
    : standard_(given.standard), kernel_(given.kernel.substr(0, given.kernel.find('@'))), tile_(tile_of(given.kernel)) {
  const Tensor &q = tensors[Slot::q], &k = tensors[Slot::k], &v = tensors[Slot::v];
  const bool packed = tensors[Slot::cu_seqlens_q].present();
  if (packed) {
    batch_axis_ = -1, seq_axis_ = 0, head_axis_ = 1, dim_axis_ = 2;
  } else if (given.heads_first) {
    head_axis_ = 1, seq_axis_ = 2;
  }
  options.device = q.device;
  options.stream = q.stream;
  options.kernel = kernel_, options.tile = tile_;
  const bool paged = tensors[Slot::page_table].present();
  const bool narrow_queries = !codes.empty() && q.dtype.bits == 8;
  for (const Tensor* tensor : {&q, &k, &v}) {
    const bool in_pages = paged && tensor != &q;
    if (here(*tensor).rank != (in_pages ? 4 : dim_axis_ + 1)) {
      refuse(*tensor, in_pages         ? "expected 4 axes, [num_pages, page_size, heads, head_dim]"
                      : packed         ? "expected 3 axes, [total, heads, head_dim]"
                      : seq_axis_ == 1 ? "expected 4 axes, [batch, seq, heads, head_dim]"
                                       : "expected 4 axes, [batch, heads, seq, head_dim]");
    }
    need_unit_last_stride(*tensor);
    if (narrow_queries && tensor == &q) {
      cache_dtype_of(q, codes);
    } else if (!codes.empty() && tensor != &q) {
      if (cache_dtype_of(*tensor, codes) != cache_dtype_of(k, codes)) refuse_dtype(*tensor, "the dtype of {k}");
    } else if (dtype_of(*tensor) != dtype_of(q)) {
      refuse_dtype(*tensor, "the dtype of {q}, " + q.describe());
    }
  }
  if (!codes.empty()) kv_dtype_ = cache_dtype_of(k, codes);
  if (v.sizes[v.rank - 1] == 0)  // which means "that of q" in a Problem
    refuse_value("head_dim_v", "got 0; allowed are 1 to " + std::to_string(max_head_dim));
  problem = {.batch = packed ? 0 : q.sizes[0],
             .seq_q = packed ? given.max_seqlen_q : q.sizes[seq_axis_],
             .seq_kv = packed ? given.max_seqlen_kv : k.sizes[seq_axis_],
             .heads_q = q.sizes[head_axis_],
             .heads_kv = k.sizes[paged && packed ? 2 : head_axis_],
             .head_dim = q.sizes[dim_axis_],
             .head_dim_v = columns_of(kv_dtype_, v.sizes[v.rank - 1]),
             .dtype = narrow_queries ? Dtype::bfloat16 : dtype_of(q),  // set_forward() sets the right one
             .packed = packed,
             .total_q = packed ? q.sizes[0] : 0,
             .total_kv = packed ? k.sizes[0] : 0,
             .alignment = given.top_left ? Alignment::top_left : Alignment::bottom_right,
             .precision = precision_of(given.precision, q)};
#define FLASH_ATTENTION_COPY_same(name) copy_option(given.name, problem.name);
#define FLASH_ATTENTION_COPY_call(name)
#define FLASH_ATTENTION_COPY(kind, name, default_value, argument, expected, form, scores) FLASH_ATTENTION_COPY_##form(name)
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_COPY)
#undef FLASH_ATTENTION_COPY
#undef FLASH_ATTENTION_COPY_call
#undef FLASH_ATTENTION_COPY_same
  if (given.invariant) problem.invariant = *given.invariant;
  if (problem.invariant) refuse_choices(given);
  problem.q_strides = strides_of(q);
  problem.latent = latent;
  if (!paged) {
    const std::int64_t of_k = stored_columns(kv_dtype_, key_columns()),
                       of_v = stored_columns(kv_dtype_, problem.head_dim_v);
    problem.k_strides = strides_of(like(k, k.sizes[seq_axis_], problem.heads_kv, of_k));
    problem.v_strides = strides_of(like(v, k.sizes[seq_axis_], problem.heads_kv, of_v));
  }
  buffers.q = q.data;
  buffers.k = k.data;
  buffers.v = v.data;

  if (packed) {
    const Tensor& starts = tensors[Slot::cu_seqlens_q];
    if (starts.rank != 1 || starts.sizes[0] < 1) {
      refuse(starts, "expected int32[batch + 1]");
    }
    problem.batch = starts.sizes[0] - 1;
    buffers.cu_seqlens_q = lengths(starts, problem.batch + 1);
    if (!paged) buffers.cu_seqlens_kv = lengths(tensors[Slot::cu_seqlens_kv], problem.batch + 1);
    // If the lengths can be read, the longest is known. A bias or mask is as wide as the caller said.
    const bool as_given =
        tensors[Slot::bias].present() || tensors[Slot::mask].present() || tensors[Slot::block_mask].present();
    if (device_traits(options.device).host_memory && !as_given) {
      if (problem.seq_q == 0) problem.seq_q = longest(buffers.cu_seqlens_q, problem.batch);
      if (problem.seq_kv == 0 && !paged) problem.seq_kv = longest(buffers.cu_seqlens_kv, problem.batch);
    }
  }
  if (paged) read_pages(tensors);
  buffers.bias = score_tensor(tensors[Slot::bias], false, problem.bias);
  buffers.mask = static_cast<const std::uint8_t*>(score_tensor(tensors[Slot::mask], true, problem.mask));
  read_hidden_rows(tensors[Slot::hidden_rows]);
  read_block_mask(tensors[Slot::block_mask], given);
  if (packed) {  // a bias is as large as the caller's bounds; without rows, the call is empty
    if (problem.total_q == 0) problem.seq_q = 0;
    if (problem.total_kv == 0 && !paged) problem.seq_kv = 0;
  }
  read_key_list(tensors, given);
  read_slopes(tensors[Slot::alibi_slopes]);
  read_sink(tensors[Slot::sink]);
  buffers.seqused_q = lengths(tensors[Slot::seqused_q], problem.batch);
  buffers.seqused_kv = lengths(tensors[Slot::seqused_kv], problem.batch);
  buffers.key_lengths = lengths(tensors[Slot::key_lengths], problem.batch);
  problem.seqused_q = tensors[Slot::seqused_q].present();
  problem.seqused_kv = tensors[Slot::seqused_kv].present();
  problem.key_lengths = tensors[Slot::key_lengths].present();
  buffers.left_padding = lengths(tensors[Slot::left_padding], problem.batch);
  problem.left_padding = tensors[Slot::left_padding].present();
  read_bit_mask(tensors);
  read_sequence_windows(tensors[Slot::sequence_windows]);
  if (!codes.empty()) problem.kv_dtype = kv_dtype_;
  if (narrow_queries) problem.q_dtype = cache_dtype_of(q, codes);
  if (has_groups(kv_dtype_)) {
    read_groups(tensors);
  } else {
    for (const Slot slot : {Slot::k_zero, Slot::v_zero, Slot::k_global_scale, Slot::v_global_scale}) {
      if (tensors[slot].present()) refuse(tensors[slot], "it belongs to {k} and {v} of 4 bits");
    }
    read_scales(tensors);
  }
  read_query_scale(tensors[Slot::q_scale]);
}

void Call::refuse_choices(const CallOptions& given) const {
  const char* const because = given.invariant ? "with invariant=True allowed is None"
                                              : "FLASH_ATTENTION_INVARIANT is on: allowed is None, or invariant=False";
  if (tile_) refuse_value("tile", std::string("was given; ") + because);
  if (standard_ || !kernel_.empty()) {
    refuse_value("kernel", "got '" + (standard_ ? std::string("standard") : kernel_) + "'; " + because);
  }
}

const Tensor& Call::here(const Tensor& tensor) const {
  if (!(tensor.device == options.device)) {
    refuse_value(tensor.name, "is on " + to_string(tensor.device) + "; {q} is on " + to_string(options.device) +
                                  ", and all must be on one device");
  }
  return tensor;
}

Strides Call::strides_of(const Tensor& tensor) const {
  if (tensor.empty()) return {};  // unused for an empty tensor, and libraries store anything there
  return {.batch = batch_axis_ < 0 ? 0 : tensor.strides[batch_axis_],
          .seq = tensor.strides[seq_axis_],
          .head = tensor.strides[head_axis_]};
}

const Tensor& Call::like(const Tensor& tensor, std::int64_t seq, std::int64_t heads, std::int64_t dim) const {
  const bool same = here(tensor).rank == dim_axis_ + 1 && tensor.sizes[seq_axis_] == seq &&
                    tensor.sizes[head_axis_] == heads && tensor.sizes[dim_axis_] == dim &&
                    (batch_axis_ < 0 || tensor.sizes[0] == problem.batch);
  if (!same) {
    refuse(tensor, "expected " + (batch_axis_ < 0  ? axes({seq, heads, dim})
                                  : seq_axis_ == 1 ? axes({problem.batch, seq, heads, dim})
                                                   : axes({problem.batch, heads, seq, dim})));
  }
  need_unit_last_stride(tensor);
  return tensor;
}

const std::int32_t* Call::lengths(const Tensor& tensor, std::int64_t count) const {
  if (!tensor.present()) {
    return nullptr;
  }
  if (!here(tensor).is_dtype(nb::dlpack::dtype_code::Int, 32)) {
    refuse_dtype(tensor, "dtype int32");
  }
  if (tensor.rank != 1 || tensor.sizes[0] != count) {
    refuse(tensor, "expected " + axes({count}));
  }
  need_unit_last_stride(tensor);
  return static_cast<const std::int32_t*>(tensor.data);
}

void Call::set_forward(const Tensor& out, const Tensor& lse, std::uint64_t seed, std::uint64_t offset) {
  const std::int64_t rows = problem.packed ? problem.total_q : problem.seq_q;
  problem.out_strides = strides_of(like(out, rows, problem.heads_q, problem.head_dim_v));
  if (problem.q_dtype) problem.dtype = dtype_of(out);
  buffers.out = out.data;
  buffers.lse = static_cast<float*>(lse.data);
  options.seed = seed;
  options.offset = offset;
}

void Call::set_gradients(const Gradients& gradients) {
  const std::int64_t rows_q = problem.packed ? problem.total_q : problem.seq_q;
  const std::int64_t rows_kv = problem.packed ? problem.total_kv : problem.seq_kv;
  problem.dout_strides = strides_of(like(gradients.dout, rows_q, problem.heads_q, problem.head_dim_v));
  problem.dq_strides = strides_of(like(gradients.dq, rows_q, problem.heads_q, problem.head_dim));
  problem.dk_strides = strides_of(like(gradients.dk, rows_kv, problem.heads_kv, problem.head_dim));
  problem.dv_strides = strides_of(like(gradients.dv, rows_kv, problem.heads_kv, problem.head_dim_v));
  buffers.dout = gradients.dout.data;
  buffers.dlse = static_cast<const float*>(gradients.dlse.data);
  buffers.dq = gradients.dq.data;
  buffers.dk = gradients.dk.data;
  buffers.dv = gradients.dv.data;
  buffers.dbias = gradients.dbias.data;
  buffers.dsink = static_cast<float*>(gradients.dsink.data);
}

void Call::set_statistics(const Statistics& statistics) {
  buffers.max_logit = static_cast<float*>(statistics.max_logit.data);
  buffers.key_mass = static_cast<float*>(statistics.key_mass.data);
  buffers.entropy = static_cast<float*>(statistics.entropy.data);
  buffers.dkey_mass = static_cast<const float*>(statistics.dkey_mass.data);
  buffers.dentropy = static_cast<const float*>(statistics.dentropy.data);
}

void Call::set_tangents(Pass pass, const Slots& tensors, const Tensor& out, const Tangents& tangents) {
  derivative_ = pass;
  const auto laid_out_as = [&](const Tensor& tangent, const Tensor& of) -> void* {
    if (!tangent.present()) return nullptr;
    bool same = here(tangent).rank == of.rank && tangent.dtype == of.dtype;
    for (int axis = 0; same && axis < of.rank; ++axis) {
      same = tangent.sizes[axis] == of.sizes[axis] &&
             (of.sizes[axis] == 1 || tangent.strides[axis] == of.strides[axis] || of.empty());
    }
    if (!same) refuse(tangent, "expected the shape, type and strides of " + std::string(of.name));
    return tangent.data;
  };
  buffers.q_tangent = laid_out_as(tangents.q, tensors[Slot::q]);
  buffers.k_tangent = laid_out_as(tangents.k, tensors[Slot::k]);
  buffers.v_tangent = laid_out_as(tangents.v, tensors[Slot::v]);
  buffers.bias_tangent = laid_out_as(tangents.bias, tensors[Slot::bias]);
  buffers.sink_tangent = static_cast<const float*>(laid_out_as(tangents.sink, tensors[Slot::sink]));
  buffers.out_tangent = laid_out_as(tangents.out, out);
  buffers.lse_tangent = static_cast<float*>(tangents.lse.data);
}

Pass Call::pass(bool backward) const {
  if (derivative_) return *derivative_;
  return backward ? (standard_ ? Pass::standard_backward : Pass::backward)
                  : (standard_ ? Pass::standard_forward : Pass::forward);
}

void Call::choose(bool backward) {
  options.kernel = kernel_, options.tile = tile_;
  if (kernel_.empty()) {
    if (backward) options.tile = {};  // a tile without a name is forward's
    return;
  }
  bool known = false;
  for (const KernelSummary& kernel : kernels()) {
    if (kernel.name == kernel_ && kernel.pass == pass(backward)) return;
    known = known || kernel.name == kernel_;
  }
  if (known) options.kernel = {}, options.tile = {};
}

std::size_t Call::plan(bool backward) {
  planned_.emplace(problem, pass(backward), options);
  return planned_->workspace_bytes(options.prepared_mask);
}

void Call::set_workspace(void* memory, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  options.workspace =
      reinterpret_cast<void*>((address + workspace_alignment - 1) / workspace_alignment * workspace_alignment);
  options.workspace_bytes = bytes;
}

void Call::run() const { planned_->run(buffers, options); }

}  // namespace flash_attention::python
