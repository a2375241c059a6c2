#include "launch/tensor_maps.h"

#include <algorithm>

#include "abi/backward_sm90.h"
#include "abi/forward_sm90.h"
#include "abi/forward_sm90_fp8.h"
#include "abi/wide_stage.h"
#include "plan/families/decode/items.h"
#include "plan/families/sm90.h"
#include "plan/workspace.h"

namespace flash_attention::launch {
namespace {

constexpr std::uint32_t chunk_bytes = 128;  // of a row: the width of the swizzle
constexpr int warpgroup_rows = 64;

/// [dim, rows, heads, batch] in boxes of `rows_of_box` rows and 128 bytes.
struct RowsOfTensor {
  const void* data;
  const Strides& strides;
  std::int64_t dim, rows, heads, batch;  // or pages
  Dtype dtype;
};

TensorMapSpec rows_map(int slot, const RowsOfTensor& tensor, int rows_of_box) {
  TensorMapSpec spec;
  spec.slot = slot;
  spec.data = tensor.data;
  spec.dtype = tensor.dtype;
  spec.rank = 4;
  const std::int64_t sizes[4] = {tensor.dim, tensor.rows, tensor.heads, tensor.batch};
  const std::int64_t strides[3] = {tensor.strides.seq, tensor.strides.head, tensor.strides.batch};
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (int i = 0; i < 4; ++i) spec.sizes[i] = static_cast<std::uint64_t>(sizes[i]);
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of one is never used, but must be a legal one.
    spec.strides_bytes[i] = static_cast<std::uint64_t>(sizes[i + 1] == 1 ? 16 : strides[i] * element);
  }
  spec.box[0] = chunk_bytes / static_cast<std::uint32_t>(element);
  spec.box[1] = static_cast<std::uint32_t>(rows_of_box);
  spec.box[2] = spec.box[3] = 1;
  return spec;
}

/// [128 bytes, rows, chunks, heads, batch] in boxes of some rows and `chunks_of_box` chunks of 128 bytes: a box is as it
/// would be in as many boxes of rows_map. The dimension has to be whole chunks.
TensorMapSpec chunks_map(int slot, const RowsOfTensor& tensor, int rows_of_box, int chunks_of_box) {
  TensorMapSpec spec = rows_map(slot, tensor, rows_of_box);
  spec.rank = 5;
  for (int i = 4; i > 2; --i) {
    spec.sizes[i] = spec.sizes[i - 1];
    spec.strides_bytes[i - 1] = spec.strides_bytes[i - 2];
    spec.box[i] = spec.box[i - 1];
  }
  spec.sizes[2] = spec.sizes[0] / spec.box[0];
  spec.strides_bytes[1] = chunk_bytes;
  spec.box[2] = static_cast<std::uint32_t>(chunks_of_box);
  spec.sizes[0] = spec.box[0];
  return spec;
}

/// A stage of some rows of a wide head, in as many parts.
TensorMapSpec wide_map(int slot, const RowsOfTensor& tensor, int parts = 1) {
  const int dim = static_cast<int>(tensor.dim), rows = abi::wide_stage_rows(dim), chunks = abi::wide_box_chunks(dim);
  return chunks > 1 ? chunks_map(slot, tensor, rows, chunks / parts) : rows_map(slot, tensor, rows);
}

RowsOfTensor query_tensor(const Problem& p, const void* data, const Strides& strides, std::int64_t dim) {
  return {data, strides, dim, p.packed ? p.total_q : p.seq_q, p.heads_q, p.packed ? 1 : p.batch, p.dtype};
}

RowsOfTensor key_tensor(const Problem& p, const void* data, const Strides& strides, std::int64_t dim) {
  if (p.page_size != 0) return {data, strides, dim, p.page_size, p.heads_kv, p.num_pages, *p.kv_dtype};
  return {data, strides, dim, p.packed ? p.total_kv : p.seq_kv, p.heads_kv, p.packed ? 1 : p.batch, *p.kv_dtype};
}

/// V^T as forward/sm90_fp8's first launch leaves it: [places, dim, heads, batch] in boxes of a chunk of places and all
/// columns.
TensorMapSpec transposed_map(int slot, const Problem& p, int block_kv, const void* data) {
  const std::int64_t places = abi::transposed_places(p.packed, p.batch, p.seq_kv, p.total_kv, block_kv);
  TensorMapSpec spec;
  spec.slot = slot;
  spec.data = data;
  spec.dtype = *p.kv_dtype;
  spec.rank = 4;
  const std::int64_t sizes[4] = {places, p.head_dim_v, p.heads_kv, p.packed ? 1 : p.batch};
  std::int64_t stride = 1;
  for (int i = 0; i < 4; ++i) {
    spec.sizes[i] = static_cast<std::uint64_t>(sizes[i]);
    stride *= sizes[i];
    if (i < 3) spec.strides_bytes[i] = static_cast<std::uint64_t>(stride);
  }
  const auto chunk = static_cast<std::uint32_t>(abi::forward_sm90_fp8_v_chunk(block_kv));
  spec.box[0] = chunk;
  spec.box[1] = static_cast<std::uint32_t>((p.head_dim_v + 31) / 32 * 32);
  spec.box[2] = spec.box[3] = 1;
  spec.swizzle_bytes = static_cast<int>(chunk);
  return spec;
}

/// K or V of decode/sm90: rows of sequences, or of pages. Elements of 8 bits go in pairs.
TensorMapSpec cache_map(int slot, const Problem& p, const void* data, const Strides& strides, std::int64_t dim,
                        int block_kv) {
  const auto element = static_cast<std::int64_t>(size_of(*p.kv_dtype)), pair = static_cast<std::int64_t>(size_of(p.dtype));
  const auto in_pairs = [&](std::int64_t elements) { return elements * element / pair; };
  const bool paged = p.page_size != 0;
  const Strides stored{in_pairs(strides.batch), in_pairs(strides.seq), in_pairs(strides.head)};
  RowsOfTensor tensor = key_tensor(p, data, stored, in_pairs(dim));
  tensor.dtype = p.dtype;
  return rows_map(slot, tensor, paged ? static_cast<int>(std::min<std::int64_t>(p.page_size, block_kv)) : block_kv);
}

/// A bias of 16 bits: [seq_kv, seq_q, heads or 1, batch or 1] in boxes of 64 queries and as many keys, or a block of fewer.
TensorMapSpec bias_map(int slot, const Problem& p, int block_kv, const void* data) {
  const Strides strides{p.bias.batch_stride, p.bias.q_stride, p.bias.head_stride};
  TensorMapSpec spec = rows_map(slot,
                                {data, strides, p.seq_kv, p.seq_q, p.bias.head_stride != 0 ? p.heads_q : 1,
                                 p.bias.batch_stride != 0 ? p.batch : 1, p.bias.dtype},
                                warpgroup_rows);
  spec.box[0] = static_cast<std::uint32_t>(std::min(block_kv, 64));
  spec.swizzle_bytes = static_cast<int>(2 * spec.box[0]);
  return spec;
}

/// Slots: Map in kernels/forward/sm90/shape.cuh.
TensorMaps forward_maps(const Problem& p, const Plan& plan, const Buffers& b) {
  const int key_rows = p.page_size != 0 ? plan::rows_of_page_box(p, plan.block_kv) : plan.block_kv;
  const RowsOfTensor values = key_tensor(p, b.v, p.v_strides, p.head_dim_v);
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
  const bool wide = abi::forward_sm90_is_wide(head_dim, head_dim_v);
  const int cluster = abi::forward_sm90_cluster(head_dim, head_dim_v, plan.block_q);  // each block loads its part
  TensorMaps maps;
  maps.add(rows_map(0, query_tensor(p, b.q, p.q_strides, p.head_dim), warpgroup_rows));
  maps.add(rows_map(1, key_tensor(p, b.k, p.k_strides, p.head_dim), key_rows / cluster));
  maps.add(wide ? wide_map(2, values, cluster) : rows_map(2, values, key_rows));
  maps.add(rows_map(3, query_tensor(p, b.out, p.out_strides, p.head_dim_v), warpgroup_rows));
  // The kernel looks at the address, too.
  if (plan::has_bias_boxes(p) && reinterpret_cast<std::uintptr_t>(b.bias) % 16 == 0)
    maps.add(bias_map(4, p, plan.block_kv, b.bias));
  return maps;
}

/// Slots: Map in kernels/forward/sm90_fp8/shape.cuh.
TensorMaps fp8_maps(const Problem& p, const Plan& plan, const Buffers& b, const void* workspace) {
  RowsOfTensor q = query_tensor(p, b.q, p.q_strides, p.head_dim);
  q.dtype = *p.q_dtype;
  const auto* transposed =
      static_cast<const char*>(workspace) + plan::offset_of(plan, abi::ForwardSm90Fp8Region::transposed_V);
  TensorMaps maps;
  maps.add(rows_map(0, q, warpgroup_rows));
  maps.add(rows_map(1, key_tensor(p, b.k, p.k_strides, p.head_dim), plan.block_kv));
  maps.add(transposed_map(2, p, plan.block_kv, transposed));
  maps.add(rows_map(3, query_tensor(p, b.out, p.out_strides, p.head_dim_v), warpgroup_rows));
  return maps;
}

/// Slots: DecodeMap in kernels/decode/sm90.cuh.
TensorMaps decode_maps(const Problem& p, const Plan& plan, const Buffers& b) {
  TensorMaps maps;
  maps.add(cache_map(0, p, b.k, p.k_strides, p.head_dim, plan.block_kv));
  maps.add(cache_map(1, p, b.v, p.v_strides, p.head_dim_v, plan.block_kv));
  return maps;
}

/// Slots: Map in kernels/decode/mla_sm90/producer.cuh.
TensorMaps mla_maps(const Problem& p, const Plan& plan, const Buffers& b) {
  TensorMaps maps;
  if (!plan::mla_takes_boxes(p)) return maps;
  const int chunks = static_cast<int>(p.head_dim_v) / 64;
  maps.add(chunks_map(0, key_tensor(p, b.v, p.v_strides, p.head_dim_v), plan.block_kv, chunks / 2));
  maps.add(rows_map(1, key_tensor(p, b.k, p.k_strides, p.head_dim - p.head_dim_v), plan.block_kv));
  return maps;
}

/// Slots: Map in kernels/backward/sm90/parts/shape.cuh.
TensorMaps backward_maps(const Problem& p, const Buffers& b) {
  const RowsOfTensor q = query_tensor(p, b.q, p.q_strides, p.head_dim), k = key_tensor(p, b.k, p.k_strides, p.head_dim),
                     v = key_tensor(p, b.v, p.v_strides, p.head_dim_v),
                     dout = query_tensor(p, b.dout, p.dout_strides, p.head_dim_v);
  TensorMaps maps;
  maps.add(rows_map(0, q, warpgroup_rows));
  maps.add(rows_map(1, k, warpgroup_rows));
  maps.add(rows_map(2, v, warpgroup_rows));
  maps.add(rows_map(3, dout, warpgroup_rows));
  // The kernel looks at the address, too.
  if (plan::has_backward_bias_boxes(p) && reinterpret_cast<std::uintptr_t>(b.bias) % 16 == 0)
    maps.add(bias_map(7, p, warpgroup_rows, b.bias));
  if (!abi::forward_sm90_is_wide(static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v))) return maps;
  maps.add(wide_map(4, q, abi::backward_sm90_columns_cluster));
  maps.add(wide_map(5, k, abi::backward_sm90_columns_cluster));
  maps.add(wide_map(6, dout, abi::backward_sm90_columns_cluster));
  return maps;
}

}  // namespace

TensorMaps tensor_maps(const Problem& p, const Plan& plan, const Buffers& b, const void* workspace) {
  switch (plan.tensor_maps) {
    case TensorMapSet::forward_sm90:
      return forward_maps(p, plan, b);
    case TensorMapSet::forward_sm90_fp8:
      return fp8_maps(p, plan, b, workspace);
    case TensorMapSet::decode_sm90:
      return decode_maps(p, plan, b);
    case TensorMapSet::decode_mla:
      return mla_maps(p, plan, b);
    case TensorMapSet::backward_sm90:
      return backward_maps(p, b);
    case TensorMapSet::none:
      break;
  }
  return {};
}

}  // namespace flash_attention::launch
