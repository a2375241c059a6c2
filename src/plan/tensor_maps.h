#pragma once

#include "flash_attention/plan.h"

// The layouts of tensor maps. Each family lists the maps of its kernel; these functions make them.

namespace flash_attention::plan {

constexpr int map_warpgroup_rows = 64;  // rows of a warpgroup: of Q, dO and O

/// Rows of [dim, rows, heads, batch], or of pages.
struct MapRows {
  MapSource source;
  const Strides& strides;
  std::int64_t dim, rows, heads, batch;
  Dtype dtype;
};

/// The rows of q, out or dout.
MapRows query_rows(const Problem& problem, MapSource source, const Strides& strides, std::int64_t dim);
/// The rows of k or v.
MapRows key_rows(const Problem& problem, MapSource source, const Strides& strides, std::int64_t dim);

/// Boxes of `rows_of_box` rows and 128 bytes.
MapLayout rows_map(int slot, const MapRows& tensor, int rows_of_box);

/// If the heads of a query are stacked: [dim, group, key heads, queries, batch] in boxes of `rows_of_box` rows of the stack,
/// `stacked` for a query.
MapLayout stacked_rows_map(int slot, const MapRows& tensor, std::int64_t heads_kv, int rows_of_box, int stacked);

/// [128 bytes, rows, chunks, heads, batch] in boxes of some rows and `chunks_of_box` chunks of 128 bytes. A box has the
/// same layout as as many boxes of rows_map. The dimension must be whole chunks.
MapLayout chunks_map(int slot, const MapRows& tensor, int rows_of_box, int chunks_of_box);

/// A stage of some rows of a wide head, in `parts` parts.
MapLayout wide_map(int slot, const MapRows& tensor, int parts = 1);

/// A bias of 16 bits: [seq_kv, seq_q, heads or 1, batch or 1] in boxes of 64 queries and 64 keys, or of a smaller block
/// of keys. The kernel uses it only if the address is aligned.
MapLayout bias_map(int slot, const Problem& problem, int block_kv);

}  // namespace flash_attention::plan
