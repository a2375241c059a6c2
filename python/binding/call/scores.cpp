// Tensors that change or hide scores: bias, masks, slopes, the sink.
#include <algorithm>

#include "call/call.h"
#include "checks.h"

namespace flash_attention::python {

const void* Call::score_tensor(const Tensor& tensor, bool boolean, ScoreTensor& out) const {
  if (!tensor.present()) {
    return nullptr;
  }
  const std::int64_t full[4] = {problem.batch, problem.heads_q,
                                problem.packed && problem.seq_q == 0 ? problem.total_q : problem.seq_q,
                                problem.packed && problem.seq_kv == 0 ? problem.total_kv : problem.seq_kv};
  std::int64_t strides[4] = {};
  bool fits = here(tensor).rank >= 1 && tensor.rank <= 4 && tensor.sizes[tensor.rank - 1] == full[3];
  for (int axis = 4 - tensor.rank; fits && axis < 4; ++axis) {
    const int own = axis - (4 - tensor.rank);
    fits = tensor.sizes[own] == full[axis] || tensor.sizes[own] == 1;
    // The stride of an empty axis may be anything; 0 would mean that it is broadcast and has one element.
    strides[axis] = tensor.sizes[own] == 1 ? 0 : tensor.sizes[own] == 0 ? 1 : tensor.strides[own];
  }
  if (!fits) {
    refuse(tensor, "expected " + axes({full[0], full[1], full[2], full[3]}) + " or 1 in place of any but the last size");
  }
  need_unit_last_stride(tensor);
  using Code = nb::dlpack::dtype_code;
  if (!boolean) {
    out.dtype = dtype_of(tensor);
  } else if (!tensor.is_dtype(Code::Bool, 8) && !tensor.is_dtype(Code::UInt, 8)) {
    refuse_dtype(tensor, "dtype bool");
  }
  out.present = true;
  out.batch_stride = strides[0];
  out.head_stride = strides[1];
  out.q_stride = strides[2];
  return tensor.data;
}

/// int32 [batch|1, heads_kv|1, seq_kv, bounds], packed [heads_kv|1, total_kv, bounds]; leading axes may be left out.
void Call::read_hidden_rows(const Tensor& tensor) {
  if (!tensor.present()) return;
  if (!here(tensor).is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(tensor, "dtype int32");
  const bool flat = problem.packed && problem.page_size == 0;
  const std::int64_t keys = flat ? problem.total_kv : problem.seq_kv, last = tensor.rank - 1;
  const std::int64_t batch = flat ? 1 : problem.batch;
  const auto size = [&](std::int64_t axis) { return axis < 0 ? 1 : tensor.sizes[axis]; };
  const auto fits = [](std::int64_t got, std::int64_t whole) { return got == 1 || got == whole; };
  const bool good = tensor.rank >= 2 && tensor.rank <= 4 && size(last - 1) == keys &&
                    fits(size(last - 2), problem.heads_kv) && fits(size(last - 3), batch) &&
                    (size(last) == 1 || size(last) == 2 || size(last) == 4);
  if (!good) {
    refuse(tensor, "expected " + (flat ? axes({problem.heads_kv, keys}) : axes({batch, problem.heads_kv, keys})) +
                       " and 1, 2 or 4 bounds behind it, or 1 in place of any size but that of the keys");
  }
  const std::int64_t bounds = size(last);
  if (!tensor.empty() && ((bounds > 1 && tensor.strides[last] != 1) || (keys > 1 && tensor.strides[last - 1] != bounds))) {
    refuse(tensor, "the last two axes must be dense");
  }
  problem.hidden_rows = {.bounds = static_cast<std::int32_t>(bounds),
                         .batch_stride = size(last - 3) > 1 ? tensor.strides[last - 3] : 0,
                         .head_stride = size(last - 2) > 1 ? tensor.strides[last - 2] : 0};
  buffers.hidden_rows = static_cast<const std::int32_t*>(tensor.data);
}

/// Bytes [batch|1, heads_q|1, blocks of queries, blocks of keys].
void Call::read_block_mask(const Tensor& tensor, const CallOptions& given) {
  if (!tensor.present()) return;
  using Code = nb::dlpack::dtype_code;
  if (!here(tensor).is_dtype(Code::Bool, 8) && !tensor.is_dtype(Code::UInt, 8)) refuse_dtype(tensor, "dtype bool or uint8");
  const std::int64_t block_q = given.mask_block_q, block_kv = given.mask_block_kv;
  if (block_q < 1 || block_kv < 1) refuse(tensor, "the sizes of its blocks must be 1 and up");
  const std::int64_t seq_q = problem.packed && problem.seq_q == 0 ? problem.total_q : problem.seq_q;
  const std::int64_t seq_kv = problem.packed && problem.seq_kv == 0 ? problem.total_kv : problem.seq_kv;
  const std::int64_t rows = (seq_q + block_q - 1) / block_q, columns = (seq_kv + block_kv - 1) / block_kv;
  const auto fits = [](std::int64_t got, std::int64_t whole) { return got == 1 || got == whole; };
  if (tensor.rank != 4 || !fits(tensor.sizes[0], problem.batch) || !fits(tensor.sizes[1], problem.heads_q) ||
      tensor.sizes[2] != rows || tensor.sizes[3] != columns) {
    refuse(tensor, "expected " + axes({problem.batch, problem.heads_q, rows, columns}) + " for blocks of " +
                       std::to_string(block_q) + " x " + std::to_string(block_kv) +
                       ", or 1 in place of the first two sizes");
  }
  need_unit_last_stride(tensor);
  problem.block_mask = {.block_q = block_q,
                        .block_kv = block_kv,
                        .batch_stride = tensor.sizes[0] > 1 ? tensor.strides[0] : 0,
                        .head_stride = tensor.sizes[1] > 1 ? tensor.strides[1] : 0,
                        .q_stride = tensor.sizes[2] > 1 ? tensor.strides[2] : 0};
  buffers.block_mask = static_cast<const std::uint8_t*>(tensor.data);
}

/// int32 [batch, rows of lists, heads, entries], packed [total_q, heads, entries], dense; counts without the last axis.
void Call::read_key_list(const Slots& tensors, const CallOptions& given) {
  const Tensor &keys = tensors[Slot::key_indices], &blocks = tensors[Slot::key_blocks], &counts = tensors[Slot::key_counts];
  const std::int64_t block_q = given.list_block_q, block_kv = given.list_block_kv;
  if (keys.present() && blocks.present()) refuse(blocks, "{key_indices} is given, too: expected one of the two");
  if (!keys.present() && !blocks.present()) {
    if (counts.present()) refuse(counts, "it belongs to {key_indices} or {key_blocks}, and there are none");
    if (block_q != 0 || block_kv != 0) refuse_value("key_block_size", "it belongs to {key_blocks}, and there are none");
    return;
  }
  const Tensor& list = keys.present() ? keys : blocks;
  if (blocks.present() && (block_q < 1 || block_kv < 1)) {
    refuse_value("key_block_size", "expected (queries, keys) for {key_blocks}, each 1 and up, got (" +
                                       std::to_string(block_q) + ", " + std::to_string(block_kv) + ")");
  }
  if (keys.present() && (block_q != 0 || block_kv != 0)) {
    refuse_value("key_block_size", "it belongs to {key_blocks}, and the call has {key_indices}");
  }
  if (problem.packed && block_q > 1) {
    refuse_value("key_block_size", "got " + std::to_string(block_q) + " queries; allowed is 1 in a packed call");
  }
  if (!here(list).is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(list, "dtype int32");
  const int heads_axis = problem.packed ? 1 : 2;
  const std::int64_t rows = blocks.present() ? (problem.seq_q + block_q - 1) / block_q : problem.seq_q;
  const auto fits = [&](const Tensor& tensor, int rank) {
    if (tensor.rank != rank) return false;
    if (problem.packed) return tensor.sizes[0] == problem.total_q;
    return tensor.sizes[0] == problem.batch && tensor.sizes[1] == rows;
  };
  const std::string before = problem.packed ? axes({problem.total_q}) : axes({problem.batch, rows});
  const std::string leading = before.substr(0, before.size() - 1);
  const std::int64_t heads = fits(list, heads_axis + 2) ? list.sizes[heads_axis] : -1;
  if (heads != 1 && heads != problem.heads_kv && !(blocks.present() && heads == problem.heads_q)) {
    refuse(list, "expected " + leading + ", G, entries] with G = 1 or " + std::to_string(problem.heads_kv) +
                     (blocks.present() ? " or " + std::to_string(problem.heads_q) : ""));
  }
  const auto need_dense = [](const Tensor& tensor) {
    std::int64_t stride = 1;
    for (int axis = tensor.rank - 1; axis >= 0 && !tensor.empty(); --axis) {
      if (tensor.sizes[axis] > 1 && tensor.strides[axis] != stride) refuse(tensor, "it must be dense: call contiguous()");
      stride *= tensor.sizes[axis];
    }
  };
  need_dense(list);
  problem.key_list = {.kind = keys.present() ? KeyListKind::keys : KeyListKind::blocks,
                      .entries = list.sizes[heads_axis + 1],
                      .heads = heads,
                      .block_q = std::max<std::int64_t>(block_q, 1),
                      .block_kv = std::max<std::int64_t>(block_kv, 1),
                      .counts = counts.present()};
  buffers.key_list = static_cast<const std::int32_t*>(list.data);
  if (!counts.present()) return;
  if (!here(counts).is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(counts, "dtype int32");
  if (!fits(counts, heads_axis + 1) || counts.sizes[heads_axis] != heads) {
    refuse(counts, "expected " + leading + ", " + std::to_string(heads) + "], as many as there are lists");
  }
  need_dense(counts);
  buffers.key_counts = static_cast<const std::int32_t*>(counts.data);
}

/// float32 [heads_q] or [batch, heads_q].
void Call::read_slopes(const Tensor& slopes) {
  if (!slopes.present()) return;
  need_float32(here(slopes));
  const bool per_batch = slopes.rank == 2 && slopes.sizes[0] == problem.batch && slopes.sizes[1] == problem.heads_q;
  if (!per_batch && !(slopes.rank == 1 && slopes.sizes[0] == problem.heads_q)) {
    refuse(slopes, "expected " + axes({problem.heads_q}) + " or " + axes({problem.batch, problem.heads_q}));
  }
  need_unit_last_stride(slopes);
  problem.alibi = true;
  problem.alibi_batch_stride = per_batch ? slopes.strides[0] : 0;
  buffers.alibi_slopes = static_cast<const float*>(slopes.data);
}

/// float32 [heads_q].
void Call::read_sink(const Tensor& sink) {
  if (!sink.present()) return;
  need_float32(here(sink));
  if (sink.rank != 1 || sink.sizes[0] != problem.heads_q) {
    refuse(sink, "expected " + axes({problem.heads_q}));
  }
  need_unit_last_stride(sink);
  problem.sink = true;
  buffers.sink = static_cast<const float*>(sink.data);
}

}  // namespace flash_attention::python
