#include "call.h"

namespace flash_attention::python {
namespace {

[[noreturn]] void refuse(const Tensor& tensor, const std::string& allowed) {
  throw nb::value_error((std::string(tensor.name) + ": got " + tensor.describe() + "; " + allowed).c_str());
}

std::string axes(std::initializer_list<std::int64_t> sizes) {
  std::string text = "[";
  for (std::int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

void need_float32(const Tensor& tensor) {
  if (!tensor.is_dtype(nb::dlpack::dtype_code::Float, 32)) {
    throw nb::type_error((std::string(tensor.name) + ": got " + tensor.describe() + "; expected dtype float32").c_str());
  }
}

void need_unit_last_stride(const Tensor& tensor) {
  const int last = tensor.rank - 1;
  if (tensor.sizes[last] > 1 && tensor.strides[last] != 1) {
    refuse(tensor, "the last axis has stride " + std::to_string(tensor.strides[last]) + "; it must be 1");
  }
}

}  // namespace

Call::Call(nb::tuple tensors, nb::tuple scalars) {
  const bool packed = !tensors[7].is_none();
  problem.packed = packed;
  problem.scale = scalars[2].is_none() ? std::nullopt : std::optional<float>(nb::cast<float>(scalars[2]));
  problem.softcap = nb::cast<float>(scalars[3]);
  problem.causal = nb::cast<bool>(scalars[4]);
  problem.alignment = nb::cast<bool>(scalars[5]) ? Alignment::top_left : Alignment::bottom_right;
  problem.window_left = nb::cast<std::int64_t>(scalars[6]);
  problem.window_right = nb::cast<std::int64_t>(scalars[7]);
  problem.dropout_p = nb::cast<float>(scalars[8]);
  problem.deterministic = nb::cast<bool>(scalars[9]);
  standard_ = nb::cast<bool>(scalars[11]);
  kernel_ = nb::cast<std::string>(scalars[12]);
  if (packed) {
    batch_axis_ = -1;
    seq_axis_ = 0, head_axis_ = 1, dim_axis_ = 2;
  } else if (nb::cast<bool>(scalars[10])) {
    head_axis_ = 1, seq_axis_ = 2;
  }

  const Tensor& q = add(tensors[0], "q");
  const Tensor& k = add(tensors[1], "k");
  const Tensor& v = add(tensors[2], "v");
  for (const Tensor* tensor : {&q, &k, &v}) {
    if (tensor->rank != dim_axis_ + 1) {
      refuse(*tensor, packed ? "expected 3 axes, [total, heads, head_dim]"
                             : (seq_axis_ == 1 ? "expected 4 axes, [batch, seq, heads, head_dim]"
                                               : "expected 4 axes, [batch, heads, seq, head_dim]"));
    }
    need_unit_last_stride(*tensor);
    if (dtype_of(*tensor) != dtype_of(q)) {
      throw nb::type_error(
          (std::string(tensor->name) + ": got " + tensor->describe() + "; expected the dtype of q, " + q.describe())
              .c_str());
    }
  }
  problem.dtype = dtype_of(q);
  problem.heads_q = q.sizes[head_axis_];
  problem.heads_kv = k.sizes[head_axis_];
  problem.head_dim = q.sizes[dim_axis_];
  problem.head_dim_v = v.sizes[dim_axis_];
  const std::int64_t seq_q = q.sizes[seq_axis_], seq_kv = k.sizes[seq_axis_];
  if (packed) {
    problem.total_q = seq_q;
    problem.total_kv = seq_kv;
    problem.seq_q = nb::cast<std::int64_t>(scalars[0]);
    problem.seq_kv = nb::cast<std::int64_t>(scalars[1]);
  } else {
    problem.batch = q.sizes[0];
    problem.seq_q = seq_q;
    problem.seq_kv = seq_kv;
  }
  like(k, seq_kv, problem.heads_kv, problem.head_dim);
  like(v, seq_kv, problem.heads_kv, problem.head_dim_v);
  problem.q_strides = strides_of(q);
  problem.k_strides = strides_of(k);
  problem.v_strides = strides_of(v);
  buffers.q = q.data;
  buffers.k = k.data;
  buffers.v = v.data;
  options.device = q.device;
  options.stream = q.stream;

  if (packed) {
    const Tensor& cu_seqlens_q = add(tensors[7], "cu_seqlens_q");
    problem.batch = cu_seqlens_q.rank == 1 ? cu_seqlens_q.sizes[0] - 1 : -1;
    if (problem.batch < 0) {
      refuse(cu_seqlens_q, "expected int32[batch + 1]");
    }
    --num_tensors_;
    buffers.cu_seqlens_q = lengths(tensors[7], "cu_seqlens_q", problem.batch + 1);
    buffers.cu_seqlens_kv = lengths(tensors[8], "cu_seqlens_kv", problem.batch + 1);
  }
  buffers.bias = score_tensor(tensors[3], "bias", false, problem.bias);
  buffers.mask = static_cast<const std::uint8_t*>(score_tensor(tensors[4], "mask", true, problem.mask));
  if (!tensors[5].is_none()) {
    const Tensor& slopes = add(tensors[5], "alibi_slopes");
    need_float32(slopes);
    const bool per_batch = slopes.rank == 2 && slopes.sizes[0] == problem.batch && slopes.sizes[1] == problem.heads_q;
    if (!per_batch && !(slopes.rank == 1 && slopes.sizes[0] == problem.heads_q)) {
      refuse(slopes, "expected " + axes({problem.heads_q}) + " or " + axes({problem.batch, problem.heads_q}));
    }
    need_unit_last_stride(slopes);
    problem.alibi = true;
    problem.alibi_batch_stride = per_batch ? slopes.strides[0] : 0;
    buffers.alibi_slopes = static_cast<const float*>(slopes.data);
  }
  if (!tensors[6].is_none()) {
    const Tensor& sink = add(tensors[6], "sink");
    need_float32(sink);
    if (sink.rank != 1 || sink.sizes[0] != problem.heads_q) {
      refuse(sink, "expected " + axes({problem.heads_q}));
    }
    need_unit_last_stride(sink);
    problem.sink = true;
    buffers.sink = static_cast<const float*>(sink.data);
  }
  buffers.seqused_q = lengths(tensors[9], "seqused_q", problem.batch);
  buffers.seqused_kv = lengths(tensors[10], "seqused_kv", problem.batch);
  buffers.key_lengths = lengths(tensors[11], "key_lengths", problem.batch);
  problem.seqused_q = !tensors[9].is_none();
  problem.seqused_kv = !tensors[10].is_none();
  problem.key_lengths = !tensors[11].is_none();
  options.kernel = kernel_;
}

const Tensor& Call::add(nb::handle object, const char* name, bool writable) {
  Tensor& tensor = tensors_[num_tensors_] = tensor_of(object, name, writable);
  if (num_tensors_ > 0 && !(tensor.device == tensors_[0].device)) {
    throw nb::value_error((std::string(name) + ": is on " + to_string(tensor.device) + "; q is on " +
                           to_string(tensors_[0].device) + ", and all must be on one device")
                              .c_str());
  }
  ++num_tensors_;
  return tensor;
}

Strides Call::strides_of(const Tensor& tensor) const {
  return {.batch = batch_axis_ < 0 ? 0 : tensor.strides[batch_axis_],
          .seq = tensor.strides[seq_axis_],
          .head = tensor.strides[head_axis_]};
}

const Tensor& Call::like(const Tensor& tensor, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
  const bool same = tensor.rank == dim_axis_ + 1 && tensor.sizes[seq_axis_] == seq && tensor.sizes[head_axis_] == heads &&
                    tensor.sizes[dim_axis_] == dim && (batch_axis_ < 0 || tensor.sizes[0] == problem.batch);
  if (!same) {
    refuse(tensor, "expected " + (batch_axis_ < 0  ? axes({seq, heads, dim})
                                  : seq_axis_ == 1 ? axes({problem.batch, seq, heads, dim})
                                                   : axes({problem.batch, heads, seq, dim})));
  }
  need_unit_last_stride(tensor);
  return tensor;
}

const void* Call::score_tensor(nb::handle object, const char* name, bool boolean, ScoreTensor& out) {
  if (object.is_none()) {
    return nullptr;
  }
  const Tensor& tensor = add(object, name);
  const std::int64_t seq_q = problem.packed && problem.seq_q == 0 ? problem.total_q : problem.seq_q;
  const std::int64_t seq_kv = problem.packed && problem.seq_kv == 0 ? problem.total_kv : problem.seq_kv;
  const std::int64_t full[4] = {problem.batch, problem.heads_q, seq_q, seq_kv};
  std::int64_t strides[4] = {};
  bool fits = tensor.rank >= 1 && tensor.rank <= 4 && tensor.sizes[tensor.rank - 1] == seq_kv;
  for (int axis = 4 - tensor.rank; fits && axis < 4; ++axis) {
    const int own = axis - (4 - tensor.rank);
    fits = tensor.sizes[own] == full[axis] || tensor.sizes[own] == 1;
    strides[axis] = tensor.sizes[own] == 1 ? 0 : tensor.strides[own];
  }
  if (!fits) {
    refuse(tensor, "expected " + axes({full[0], full[1], full[2], full[3]}) + " or 1 in place of any but the last size");
  }
  need_unit_last_stride(tensor);
  if (boolean) {
    const bool one_byte =
        tensor.is_dtype(nb::dlpack::dtype_code::Bool, 8) || tensor.is_dtype(nb::dlpack::dtype_code::UInt, 8);
    if (!one_byte) {
      throw nb::type_error((std::string(name) + ": got " + tensor.describe() + "; expected dtype bool").c_str());
    }
  } else {
    out.dtype = dtype_of(tensor);
  }
  out.present = true;
  out.batch_stride = strides[0];
  out.head_stride = strides[1];
  out.q_stride = strides[2];
  return tensor.data;
}

const std::int32_t* Call::lengths(nb::handle object, const char* name, std::int64_t count) {
  if (object.is_none()) {
    return nullptr;
  }
  const Tensor& tensor = add(object, name);
  if (!tensor.is_dtype(nb::dlpack::dtype_code::Int, 32)) {
    throw nb::type_error((std::string(name) + ": got " + tensor.describe() + "; expected dtype int32").c_str());
  }
  if (tensor.rank != 1 || tensor.sizes[0] != count) {
    refuse(tensor, "expected " + axes({count}));
  }
  need_unit_last_stride(tensor);
  return static_cast<const std::int32_t*>(tensor.data);
}

void Call::set_forward(nb::handle out, nb::handle lse, std::uint64_t seed, std::uint64_t offset) {
  const std::int64_t rows = problem.packed ? problem.total_q : problem.seq_q;
  const Tensor& result = like(add(out, "out", true), rows, problem.heads_q, problem.head_dim_v);
  problem.out_strides = strides_of(result);
  buffers.out = result.data;
  if (!lse.is_none()) {
    buffers.lse = static_cast<float*>(add(lse, "lse", true).data);
  }
  options.seed = seed;
  options.offset = offset;
}

void Call::set_backward(nb::tuple results, nb::tuple gradients, std::uint64_t seed, std::uint64_t offset) {
  set_forward(results[0], results[1], seed, offset);
  const std::int64_t rows_q = problem.packed ? problem.total_q : problem.seq_q;
  const std::int64_t rows_kv = problem.packed ? problem.total_kv : problem.seq_kv;
  const Tensor& dout = like(add(gradients[0], "dout"), rows_q, problem.heads_q, problem.head_dim_v);
  const Tensor& dq = like(add(gradients[2], "dq", true), rows_q, problem.heads_q, problem.head_dim);
  const Tensor& dk = like(add(gradients[3], "dk", true), rows_kv, problem.heads_kv, problem.head_dim);
  const Tensor& dv = like(add(gradients[4], "dv", true), rows_kv, problem.heads_kv, problem.head_dim_v);
  problem.dout_strides = strides_of(dout);
  problem.dq_strides = strides_of(dq);
  problem.dk_strides = strides_of(dk);
  problem.dv_strides = strides_of(dv);
  buffers.dout = dout.data;
  buffers.dq = dq.data;
  buffers.dk = dk.data;
  buffers.dv = dv.data;
  if (!gradients[1].is_none()) {
    buffers.dlse = static_cast<const float*>(add(gradients[1], "dlse").data);
  }
  if (!gradients[5].is_none()) {
    buffers.dbias = add(gradients[5], "dbias", true).data;
  }
  if (!gradients[6].is_none()) {
    buffers.dsink = static_cast<float*>(add(gradients[6], "dsink", true).data);
  }
}

Pass Call::pass(bool backward) const {
  return backward ? (standard_ ? Pass::standard_backward : Pass::backward)
                  : (standard_ ? Pass::standard_forward : Pass::forward);
}

void Call::run(bool backward, std::uintptr_t stream, nb::handle allocate) {
  if (options.stream == nullptr) {
    options.stream = reinterpret_cast<void*>(stream);
  }
  constexpr std::size_t alignment = 256;
  nb::object owner;
  Tensor memory;
  if (const std::size_t bytes = workspace_bytes(problem, pass(backward), options)) {
    owner = allocate(bytes + alignment);
    memory = tensor_of(owner, "workspace", true);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data);
    options.workspace = reinterpret_cast<void*>((address + alignment - 1) / alignment * alignment);
    options.workspace_bytes = bytes;
  }
  nb::gil_scoped_release released;
  switch (pass(backward)) {
    case Pass::forward:
      return forward(problem, buffers, options);
    case Pass::backward:
      return flash_attention::backward(problem, buffers, options);
    case Pass::standard_forward:
      return standard_forward(problem, buffers, options);
    case Pass::standard_backward:
      return standard_backward(problem, buffers, options);
  }
}

}  // namespace flash_attention::python
