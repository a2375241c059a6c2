#include "plan/tensor_maps.h"

#include <algorithm>

#include "abi/wide_stage.h"

namespace flash_attention::plan {
namespace {

constexpr std::uint32_t chunk_bytes = 128;  // of a row: the width of the swizzle

std::uint32_t chunk_columns(const MapRows& tensor) { return chunk_bytes / static_cast<std::uint32_t>(size_of(tensor.dtype)); }

/// All of a map but its box. Strides are in elements, of all dimensions but the first.
template <std::size_t rank>
MapLayout map_of(int slot, const MapRows& tensor, const std::array<std::int64_t, rank>& sizes,
                 const std::array<std::int64_t, rank - 1>& strides) {
  MapLayout map{.slot = slot, .source = tensor.source, .dtype = tensor.dtype, .rank = static_cast<int>(rank)};
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (std::size_t i = 0; i < rank; ++i) map.sizes[i] = static_cast<std::uint64_t>(sizes[i]);
  for (std::size_t i = 0; i + 1 < rank; ++i) {
    // The stride of a dimension of one is never used, but must be a legal one.
    map.strides_bytes[i] = static_cast<std::uint64_t>(sizes[i + 1] == 1 ? 16 : strides[i] * element);
  }
  return map;
}

}  // namespace

MapRows query_rows(const Problem& p, MapSource source, const Strides& strides, std::int64_t dim) {
  return {source, strides, dim, p.packed ? p.total_q : p.seq_q, p.heads_q, p.packed ? 1 : p.batch, p.dtype};
}

MapRows key_rows(const Problem& p, MapSource source, const Strides& strides, std::int64_t dim) {
  if (p.page_size != 0) return {source, strides, dim, p.page_size, p.heads_kv, p.num_pages, *p.kv_dtype};
  return {source, strides, dim, p.packed ? p.total_kv : p.seq_kv, p.heads_kv, p.packed ? 1 : p.batch, *p.kv_dtype};
}

MapLayout rows_map(int slot, const MapRows& tensor, int rows_of_box) {
  MapLayout map = map_of<4>(slot, tensor, {tensor.dim, tensor.rows, tensor.heads, tensor.batch},
                            {tensor.strides.seq, tensor.strides.head, tensor.strides.batch});
  map.box = {chunk_columns(tensor), static_cast<std::uint32_t>(rows_of_box), 1, 1};
  return map;
}

MapLayout stacked_rows_map(int slot, const MapRows& tensor, std::int64_t heads_kv, int rows_of_box, int stacked) {
  const std::int64_t group = tensor.heads / heads_kv;
  MapLayout map =
      map_of<5>(slot, tensor, {tensor.dim, group, heads_kv, tensor.rows, tensor.batch},
                {tensor.strides.head, group * tensor.strides.head, tensor.strides.seq, tensor.strides.batch});
  map.box = {chunk_columns(tensor), static_cast<std::uint32_t>(stacked), 1,
             static_cast<std::uint32_t>(rows_of_box / stacked), 1};
  return map;
}

MapLayout chunks_map(int slot, const MapRows& tensor, int rows_of_box, int chunks_of_box) {
  MapLayout map = rows_map(slot, tensor, rows_of_box);
  map.rank = 5;
  for (std::size_t i = 4; i > 2; --i) {
    map.sizes[i] = map.sizes[i - 1];
    map.strides_bytes[i - 1] = map.strides_bytes[i - 2];
    map.box[i] = map.box[i - 1];
  }
  map.sizes[2] = map.sizes[0] / map.box[0];
  map.strides_bytes[1] = chunk_bytes;
  map.box[2] = static_cast<std::uint32_t>(chunks_of_box);
  map.sizes[0] = map.box[0];
  return map;
}

MapLayout wide_map(int slot, const MapRows& tensor, int parts) {
  const int dim = static_cast<int>(tensor.dim), rows = abi::wide_stage_rows(dim), chunks = abi::wide_box_chunks(dim);
  return chunks > 1 ? chunks_map(slot, tensor, rows, chunks / parts) : rows_map(slot, tensor, rows);
}

MapLayout bias_map(int slot, const Problem& p, int block_kv) {
  const Strides strides{p.bias.batch_stride, p.bias.q_stride, p.bias.head_stride};
  MapLayout map = rows_map(slot,
                           {MapSource::bias, strides, p.seq_kv, p.seq_q, p.bias.head_stride != 0 ? p.heads_q : 1,
                            p.bias.batch_stride != 0 ? p.batch : 1, p.bias.dtype},
                           map_warpgroup_rows);
  map.box[0] = static_cast<std::uint32_t>(std::min(block_kv, 64));
  map.swizzle_bytes = static_cast<int>(2 * map.box[0]);
  map.only_if_aligned = true;
  return map;
}

}  // namespace flash_attention::plan
