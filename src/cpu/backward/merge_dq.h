#pragma once

// dQ if the keys of a head are split: each split writes its sums to CpuRegion::split_dQ, [split][row][padded head_dim].
// A second step adds them in order, so every run has the same result.

#include "cpu/tile/partial.h"

namespace flash_attention::cpu {
namespace {

inline float* partial_dq(const Call& call, std::int64_t split, std::int64_t row) {
  return region<float>(call, plan::CpuRegion::split_dQ) +
         (split * total_rows(call) + row) * plan::cpu_padded(call.head_dim);
}

/// One row of dQ from `count` sums that are `distance` apart.
inline void write_dq(const Call& call, const RowBlock& block, int row, const float* sums, int count,
                     std::int64_t distance) {
  with_element(call.dtype, [&](auto type) {
    using T = decltype(type);
    auto* to = reinterpret_cast<typename T::Stored*>(block.row(call, call.dq, row));
    for (int c = 0; c < call.head_dim; c += vector_lanes) {
      Vec sum = load(sums + c);
      for (int i = 1; i < count; ++i) sum += load(sums + i * distance + c);
      store_some<T>(to + c, sum * call.scale, call.head_dim - c);
    }
  });
}

/// Whether the keys of a head are split: if all its rows go over them together.
inline bool splits_keys(const Call& call) { return blocks_per_head(call) <= call.blocks_together; }

/// Writes dQ of a block from its sums in lanes, dQt[head_dim][lanes]. factor: memory for the factors of its lanes.
inline void write_dq(const Call& call, const RowBlock& block, int split, const float* dQt, float* factor) {
  const bool whole = !splits_keys(call) || call.num_splits == 1;
  for (int lane = 0; lane < block.lanes(); ++lane) factor[lane] = whole ? call.scale : 1;
  if (whole) return scatter_rows(call, block, dQt, call.head_dim, factor, call.dq);
  const auto row_of = [&](int lane) { return partial_dq(call, split, block.row_idx(call, lane)); };
  scatter_lanes<Float32>(dQt, block.vectors, block.rows, call.head_dim, factor, row_of);
}

inline std::int64_t merge_dq_items(const Call& call) {
  return splits_keys(call) && call.num_splits > 1 ? call.batch * call.heads_kv : 0;
}

/// Merges dQ of the rows of one key head.
inline void merge_dq(const Call& call, std::int64_t item, void* /*scratch*/) {
  const int kv_head = static_cast<int>(item % call.heads_kv);
  const std::int64_t distance = total_rows(call) * plan::cpu_padded(call.head_dim);
  for (std::int64_t first = 0; first < blocks_per_head(call); ++first) {
    const RowBlock block(call, item / call.heads_kv, kv_head * call.group, call.group, first * block_q);
    for (int row = 0; row < block.rows; ++row) {
      write_dq(call, block, row, partial_dq(call, 0, block.row_idx(call, row)), call.num_splits, distance);
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
