#pragma once

// The results of a block. With one split they go to out and lse. With several, sums and statistics go to the workspace
// (CpuRegion::split_sums and split_statistics), and a second step merges them.

#include "cpu/tile/softmax.h"

namespace flash_attention::cpu {
namespace {

inline std::int64_t total_rows(const Call& call) {
  return call.heads_q * (call.cu_seqlens_q != nullptr ? call.total_q : call.batch * call.seq_q);
}

inline float* partial_sums(const Call& call, std::int64_t split, std::int64_t row) {
  return region<float>(call, plan::CpuRegion::split_sums) +
         (split * total_rows(call) + row) * plan::cpu_padded(call.head_dim_v);
}

/// The largest score of a row and the sum relative to it; with an entropy also the moment.
inline float* partial_statistics(const Call& call, std::int64_t split, std::int64_t row) {
  const int numbers = call.entropy != nullptr ? 3 : 2;
  return region<float>(call, plan::CpuRegion::split_statistics) + (split * total_rows(call) + row) * numbers;
}

/// A unit of work of forward: some blocks of rows (call.blocks_together) and a part of the keys. Later blocks come
/// first: under a causal mask they see more keys.
struct ForwardItem {
  std::int64_t batch, first_block;
  int kv_head, split;

  static std::int64_t per_head(const Call& call) { return ceil_div(blocks_per_head(call), call.blocks_together); }

  ForwardItem(const Call& call, std::int64_t item) {
    split = static_cast<int>(item % call.num_splits);
    item /= call.num_splits;
    first_block = (per_head(call) - 1 - item % per_head(call)) * call.blocks_together;
    item /= per_head(call);
    kv_head = static_cast<int>(item % call.heads_kv);
    batch = item / call.heads_kv;
  }

  RowBlock rows(const Call& call) const { return {call, batch, kv_head * call.group, call.group, first_block * block_q}; }
};

inline std::int64_t forward_items(const Call& call) {
  return call.batch * call.heads_kv * ForwardItem::per_head(call) * call.num_splits;
}
inline std::int64_t merge_items(const Call& call) {
  return call.num_splits == 1 ? 0 : forward_items(call) / call.num_splits;
}

/// Narrows the keys of a block, or of a list of blocks, to one part: whole units, as equal as possible.
template <class Block>
inline void take_split(const Call& call, int split, int unit, Block& block) {
  if (call.num_splits == 1 || block.key_end <= block.key_begin) return;
  const std::int64_t units = ceil_div(block.key_end - block.key_begin, unit);
  const std::int64_t first = units * split / call.num_splits, last = units * (split + 1) / call.num_splits;
  block.key_end = smaller(block.key_end, block.key_begin + last * unit);
  block.key_begin += first * unit;
}

inline void write_lse(const Call& call, const RowBlock& block, int lane, float lse) {
  if (call.lse != nullptr) call.lse[block.row_idx(call, lane)] = lse;
}

/// Computes factor[lane] for the sums, and lse or the statistics for the merge.
inline void finish_rows(const Call& call, const RowBlock& block, int split, const Statistics& statistics, float* factor) {
  for (int lane = 0; lane < block.lanes(); ++lane) factor[lane] = 1;
  for (int lane = 0; lane < block.rows; ++lane) {
    if (call.num_splits > 1) {
      float* to = partial_statistics(call, split, block.row_idx(call, lane));
      to[0] = statistics.row_max[lane];
      to[1] = statistics.row_sum[lane];
      if (call.entropy != nullptr) to[2] = statistics.row_moment[lane];
    } else {
      const RowResult result = finish_row(call, block, lane, statistics.row_max[lane], statistics.row_sum[lane]);
      factor[lane] = result.factor;
      write_lse(call, block, lane, result.lse);
      write_statistics(call, block, lane, statistics.row_max[lane], statistics.row_sum[lane], statistics.row_moment[lane],
                       result);
    }
  }
}

/// Writes a block whose sums are in lanes, Ot[head_dim_v][lanes]. factor: memory for the factors of its lanes.
inline void write_block(const Call& call, const RowBlock& block, int split, const Statistics& statistics, const float* Ot,
                        float* factor) {
  finish_rows(call, block, split, statistics, factor);
  if (call.num_splits == 1) return scatter_rows(call, block, Ot, call.head_dim_v, factor, call.out);
  const auto row_of = [&](int lane) { return partial_sums(call, split, block.row_idx(call, lane)); };
  scatter_lanes<Float32>(Ot, block.vectors, block.rows, call.head_dim_v, factor, row_of);
}

/// The same for sums in rows, O[rows][columns]; columns: head_dim_v rounded up to whole vectors.
inline void write_rows(const Call& call, const RowBlock& block, int split, const Statistics& statistics, const float* O,
                       int columns, float* factor) {
  finish_rows(call, block, split, statistics, factor);
  for (int row = 0; row < block.rows; ++row) {
    const auto write = [&](auto type, void* to) {
      using T = decltype(type);
      for (int c = 0; c < call.head_dim_v; c += vector_lanes) {
        const Vec sum = load(O + row * columns + c) * factor[row];
        store_some<T>(static_cast<typename T::Stored*>(to) + c, sum, call.head_dim_v - c);
      }
    };
    if (call.num_splits > 1) {
      write(Float32{}, partial_sums(call, split, block.row_idx(call, row)));
    } else {
      with_element(call.dtype, [&](auto type) { write(type, block.row(call, call.out, row)); });
    }
  }
}

/// Merges one block's rows.
inline void merge(const Call& call, std::int64_t item, void* /*scratch*/) {
  const RowBlock block = ForwardItem(call, item * call.num_splits).rows(call);
  for (int lane = 0; lane < block.rows; ++lane) {
    const std::int64_t row = block.row_idx(call, lane);
    float row_max = -infinity, row_sum = 0, row_moment = 0;
    for (int split = 0; split < call.num_splits; ++split) {
      row_max = larger(row_max, partial_statistics(call, split, row)[0]);
    }
    const float origin = row_max == -infinity ? 0 : row_max;
    for (int split = 0; split < call.num_splits; ++split) {
      const float* part = partial_statistics(call, split, row);
      row_sum += part[1] * exp2_one(part[0] - origin);
      if (call.entropy == nullptr || part[0] == -infinity) continue;
      row_moment += (part[2] + part[1] * (part[0] - origin)) * exp2_one(part[0] - origin);
    }
    const RowResult result = finish_row(call, block, lane, row_max, row_sum);
    write_lse(call, block, lane, result.lse);
    write_statistics(call, block, lane, row_max, row_sum, row_moment, result);
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      auto* out = reinterpret_cast<typename T::Stored*>(block.row(call, call.out, lane));
      for (int c = 0; c < call.head_dim_v; c += vector_lanes) {
        Vec sum{};
        for (int split = 0; split < call.num_splits; ++split) {
          const float weight = result.factor * exp2_one(partial_statistics(call, split, row)[0] - origin);
          sum += load(partial_sums(call, split, row) + c) * weight;
        }
        store_some<T>(out + c, sum, call.head_dim_v - c);
      }
    });
  }
}

}  // namespace
}  // namespace flash_attention::cpu
