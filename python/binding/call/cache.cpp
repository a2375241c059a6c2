// Keys in a cache: in pages, in 8 bits with scales, and the keys that each sequence of a serving step sees.
#include "call/call.h"
#include "checks.h"

namespace flash_attention::python {

/// K and V in pages, [num_pages, page_size, heads, head_dim] or as heads_first says, for every form of q.
void Call::read_pages(const Slots& tensors) {
  const Tensor &k = tensors[Slot::k], &v = tensors[Slot::v], &table = tensors[Slot::page_table];
  const int seq_axis = seq_axis_ == 2 ? 2 : 1, head_axis = 3 - seq_axis;
  if (!here(table).is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(table, "dtype int32");
  if (table.rank != 2 || table.sizes[0] != problem.batch)
    refuse(table, "expected [" + std::to_string(problem.batch) + ", pages]");
  need_unit_last_stride(table);
  const auto strides_in_pages = [&](const Tensor& tensor, std::int64_t dim) -> Strides {
    if (tensor.sizes[0] != k.sizes[0] || tensor.sizes[seq_axis] != k.sizes[seq_axis] ||
        tensor.sizes[head_axis] != problem.heads_kv || tensor.sizes[3] != dim) {
      refuse(tensor, "expected pages like those of {k}, with a head_dim of " + std::to_string(dim));
    }
    if (tensor.empty()) return {};
    return {.batch = tensor.strides[0], .seq = tensor.strides[seq_axis], .head = tensor.strides[head_axis]};
  };
  problem.k_strides = strides_in_pages(k, stored_columns(kv_dtype_, key_columns()));
  problem.v_strides = strides_in_pages(v, stored_columns(kv_dtype_, problem.head_dim_v));
  problem.num_pages = k.sizes[0];
  problem.page_size = k.sizes[seq_axis];
  problem.page_table_stride = table.sizes[0] > 1 ? table.strides[0] : table.sizes[1];
  problem.seq_kv = table.sizes[1] * problem.page_size;  // the capacity: one plan for all lengths
  problem.total_kv = 0;
  buffers.page_table = static_cast<const std::int32_t*>(table.data);
}

/// Bits of keys, uint8 [bytes] with offsets; or of drafts, uint8 [batch, queries, bytes], with packed queries or offsets
/// [rows, bytes].
void Call::read_bit_mask(const Slots& tensors) {
  const Tensor &bits = tensors[Slot::bit_mask], &offsets = tensors[Slot::bit_mask_offsets];
  buffers.bit_mask_offsets = lengths(offsets, problem.batch + 1);
  problem.bit_mask.offsets = offsets.present();
  if (!bits.present()) {
    if (offsets.present()) refuse(offsets, "it belongs to {bit_mask}, which is not given");
    return;
  }
  if (!here(bits).is_dtype(nb::dlpack::dtype_code::UInt, 8)) refuse_dtype(bits, "dtype uint8");
  std::int64_t bytes = 1;
  for (int axis = bits.rank - 1; axis >= 0; --axis) {
    if (bits.sizes[axis] > 1 && bits.strides[axis] != bytes && !bits.empty())
      refuse(bits, "it has gaps (torch: .contiguous(); NumPy: numpy.ascontiguousarray)");
    bytes *= bits.sizes[axis];
  }
  if (bits.rank == 1) {
    if (!offsets.present()) refuse(bits, "bits of keys need the offsets of the sequences, {bit_mask_offsets}");
    problem.bit_mask.kind = BitMaskKind::keys;
  } else {
    problem.bit_mask.kind = BitMaskKind::drafts;
    problem.bit_mask.row_bytes = bits.rank > 0 ? bits.sizes[bits.rank - 1] : 0;
    const std::int64_t row_bytes = problem.bit_mask.row_bytes;
    const bool flat = problem.packed || offsets.present();
    const bool fits = flat ? bits.rank == 2 && (offsets.present() || bits.sizes[0] == problem.total_q)
                           : bits.rank == 3 && bits.sizes[0] == problem.batch && bits.sizes[1] == problem.seq_q;
    if (!fits) {
      refuse(bits, "expected " + (flat ? offsets.present() ? "[rows, bytes]" : axes({problem.total_q, row_bytes})
                                       : axes({problem.batch, problem.seq_q, row_bytes})));
    }
  }
  buffers.bit_mask = static_cast<const std::uint8_t*>(bits.data);
  if (!offsets.present() || !device_traits(options.device).host_memory) return;
  if (const std::int64_t end = buffers.bit_mask_offsets[problem.batch]; end > bytes) {
    refuse(bits, "{bit_mask_offsets} ends at " + std::to_string(end) + " bytes");
  }
}

void Call::read_sequence_windows(const Tensor& windows) {
  if (!windows.present()) return;
  if (!here(windows).is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(windows, "dtype int32");
  const bool fits = windows.rank == 2 && windows.sizes[0] == problem.batch && windows.sizes[1] == 2;
  if (!fits) refuse(windows, "expected " + axes({problem.batch, 2}));
  need_unit_last_stride(windows);
  if (windows.sizes[0] > 1 && windows.strides[0] != 2) refuse(windows, "it has gaps");
  problem.sequence_windows = true;
  buffers.sequence_windows = static_cast<const std::int32_t*>(windows.data);
}

/// Scales of K and V in 8 bits: one number, [batch, heads], or one for each row and head.
void Call::read_scales(const Slots& tensors) {
  const Tensor& k = tensors[Slot::k];
  const bool packed = problem.packed && problem.page_size == 0, heads_first = seq_axis_ == 2;
  const auto read = [&](const Tensor& scale, Strides& strides) -> const float* {
    if (!scale.present()) return nullptr;
    need_float32(here(scale));
    ScaleKind kind = ScaleKind::tensor;
    const int heads_axis = packed ? 1 : heads_first ? 1 : 2, rows_axis = packed ? 0 : 3 - heads_axis;
    const bool of_rows = scale.rank == (packed ? 2 : 3) && scale.sizes[0] == k.sizes[0] &&
                         scale.sizes[rows_axis] == k.sizes[rows_axis] && scale.sizes[heads_axis] == problem.heads_kv;
    if (scale.rank == 2 && scale.sizes[0] == problem.batch && scale.sizes[1] == problem.heads_kv && !(packed && of_rows)) {
      kind = ScaleKind::head;
      strides = {scale.strides[0], 0, scale.strides[1]};
    } else if (of_rows) {
      kind = ScaleKind::token;
      strides = {packed ? 0 : scale.strides[0], scale.strides[rows_axis], scale.strides[heads_axis]};
    } else if (scale.rank > 1 || (scale.rank == 1 && scale.sizes[0] != 1)) {
      refuse(scale,
             "expected one number, " + axes({problem.batch, problem.heads_kv}) + " or one for each row and head of {k}");
    }
    if (problem.kv_scales != ScaleKind::none && problem.kv_scales != kind)
      refuse(scale, "expected scales like those of {k_scale}, of " + std::string(to_string(problem.kv_scales)));
    problem.kv_scales = kind;
    if (scale.empty()) strides = {};
    return static_cast<const float*>(scale.data);
  };
  const Tensor &k_scale = tensors[Slot::k_scale], &v_scale = tensors[Slot::v_scale];
  if (k_scale.present() != v_scale.present())
    refuse(k_scale.present() ? k_scale : v_scale, "{k_scale} and {v_scale} go together");
  buffers.k_scale = read(k_scale, problem.k_scale_strides);
  buffers.v_scale = read(v_scale, problem.v_scale_strides);
}

/// For K and V of 4 bits: scales of groups, zeros with the same strides (int4), and one number for the tensor (nvfp4).
void Call::read_groups(const Slots& tensors) {
  const bool packed = problem.packed && problem.page_size == 0;
  const int rank = packed ? 3 : 4, heads_axis = packed || seq_axis_ == 2 ? 1 : 2, rows_axis = packed ? 0 : 3 - heads_axis;
  const auto read = [&](const Tensor& numbers, const Tensor& codes, std::int64_t columns, Strides& strides) -> const void* {
    need_group_dtype(here(numbers), kv_dtype_, problem.dtype);
    bool fits = numbers.rank == rank && numbers.sizes[rank - 1] > 0 && columns % numbers.sizes[rank - 1] == 0;
    for (int axis = 0; fits && axis < rank - 1; ++axis) fits = numbers.sizes[axis] == codes.sizes[axis];
    if (!fits)
      refuse(numbers, "expected the shape of " + codes.describe() + " with a number for each group of columns last");
    need_unit_last_stride(numbers);
    const std::int64_t group = columns / numbers.sizes[rank - 1];
    if (problem.kv_group != 0 && problem.kv_group != group)
      refuse(numbers, "expected groups of " + std::to_string(problem.kv_group) + " columns, as those of {k_scale}");
    problem.kv_group = group;
    strides = {packed ? 0 : numbers.strides[0], numbers.strides[rows_axis], numbers.strides[heads_axis]};
    if (numbers.empty()) strides = {};
    return numbers.data;
  };
  const auto read_both = [&](const Tensor& codes, std::int64_t columns, const Tensor& scales, const Tensor& zeros,
                             Strides& strides, const void*& to, const void*& zeros_to) {
    if (!scales.present())
      refuse_value(scales.name == nullptr ? "k_scale, v_scale" : scales.name,
                   "{k} and {v} of 4 bits have scales of groups");
    to = read(scales, codes, columns, strides);
    if (zeros.present() != (kv_dtype_ == Dtype::int4)) {
      refuse_value(&codes == &tensors[Slot::k] ? "k_zero" : "v_zero",
                   zeros.present() ? "it belongs to int4" : "{k} and {v} of int4 have zeros of groups");
    }
    if (!zeros.present()) return;
    Strides of_zeros;
    zeros_to = read(zeros, codes, columns, of_zeros);
    if (!(of_zeros == strides)) refuse(zeros, "expected the strides of its scales");
  };
  read_both(tensors[Slot::k], key_columns(), tensors[Slot::k_scale], tensors[Slot::k_zero], problem.k_group_strides,
            buffers.k_group_scale, buffers.k_group_zero);
  read_both(tensors[Slot::v], problem.head_dim_v, tensors[Slot::v_scale], tensors[Slot::v_zero], problem.v_group_strides,
            buffers.v_group_scale, buffers.v_group_zero);
  const Tensor &k_scale = tensors[Slot::k_global_scale], &v_scale = tensors[Slot::v_global_scale];
  if (k_scale.present() != v_scale.present())
    refuse(k_scale.present() ? k_scale : v_scale, "{k_global_scale} and {v_global_scale} go together");
  if (!k_scale.present()) return;
  for (const Tensor* scale : {&k_scale, &v_scale}) {
    need_float32(here(*scale));
    if (scale->rank > 1 || (scale->rank == 1 && scale->sizes[0] != 1)) refuse(*scale, "expected one number");
  }
  problem.kv_scales = ScaleKind::tensor;
  buffers.k_scale = static_cast<const float*>(k_scale.data);
  buffers.v_scale = static_cast<const float*>(v_scale.data);
}

/// Scales of Q in 8 bits: one number, or [batch, heads_kv].
void Call::read_query_scale(const Tensor& scale) {
  if (!scale.present()) return;
  need_float32(here(scale));
  buffers.q_scale = static_cast<const float*>(scale.data);
  problem.q_scales = ScaleKind::tensor;
  if (scale.rank == 0 || (scale.rank == 1 && scale.sizes[0] == 1)) return;
  if (scale.rank != 2 || scale.sizes[0] != problem.batch || scale.sizes[1] != problem.heads_kv) {
    refuse(scale, "expected one number or " + axes({problem.batch, problem.heads_kv}));
  }
  problem.q_scales = ScaleKind::head;
  problem.q_scale_strides = {scale.strides[0], 0, scale.strides[1]};
  if (scale.empty()) problem.q_scale_strides = {};
}

}  // namespace flash_attention::python
