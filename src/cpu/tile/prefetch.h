#pragma once

// Prefetches the rows of K and V that are read next. In a [seq, heads, dim] tensor the rows of a head are far apart, so
// the hardware does not predict them.

#include "cpu/tile/rows.h"

namespace flash_attention::cpu {
namespace {

/// Rows [next, end) of a key head, page by page if there are pages.
struct KeyRuns {
  const Call* call;
  const RowBlock* block;
  const TensorView* tensor;
  int kv_head;
  std::int64_t next, end;
};

/// Prefetches rows that are read soon, a few cache lines at a time.
struct RowPrefetch {
  KeyRuns runs;
  std::int64_t row_width;  // bytes
  const char* row = nullptr;
  std::int64_t stride = 0;  // bytes
  std::int64_t width = 0;   // bytes of a row, or of a whole run if rows are adjacent
  std::int64_t rows = 0;    // left in the run
  std::int64_t at = 0;

  RowPrefetch(const KeyRuns& key_runs, std::int64_t bytes_of_row) : runs(key_runs), row_width(bytes_of_row) { take_run(); }

  FLASH_ATTENTION_INLINE void prefetch(int lines) {
    for (int i = 0; i < lines && rows > 0; ++i) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at < width) continue;
      at = 0;
      row += stride;
      if (--rows == 0) take_run();
    }
  }

 private:
  /// Moves to the next rows that are one stride apart. The block may be at another key head by now.
  void take_run() {
    if (runs.next >= runs.end) return;  // the table may end here
    rows = smaller(runs.end - runs.next, runs.block->keys_together(*runs.call, runs.next));
    row = runs.block->key_row(*runs.call, *runs.tensor, runs.next, runs.kv_head);
    stride = runs.tensor->seq_stride * bytes_of(runs.call->kv_dtype);
    width = row_width;
    runs.next += rows;
    if (stride == width) width *= rows, rows = 1;
  }
};

/// Bytes of so many columns of a row.
inline std::int64_t key_bytes(const Call& call, std::int64_t columns) {
  return columns * bytes_of(call.kv_dtype) / (call.kv_group != 0 ? 2 : 1);
}

/// Whether K and V exceed the caches. If they do not, a prefetch would cost as much as the read.
inline bool exceeds_cache(const Call& call) {
  return key_bytes(call, call.seq_kv * call.heads_kv * (call.head_dim + call.head_dim_v)) > call.cache_resident_bytes;
}

/// The next tile, which is prefetched a few lines at a time while this one is processed.
struct NextTile {
  RowPrefetch K, V;
  int key_lines, value_lines;  // lines to prefetch with each step of the scores, and of the sums

  bool is_wanted() const { return K.rows > 0 || V.rows > 0; }
  FLASH_ATTENTION_INLINE void prefetch_keys() { K.prefetch(key_lines); }
  FLASH_ATTENTION_INLINE void prefetch_values() { V.prefetch(value_lines); }
};

/// Rows [begin, end) of `heads` adjacent key heads, from the block's on.
inline RowPrefetch prefetch_of_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns,
                                    int heads, std::int64_t begin, std::int64_t end) {
  return RowPrefetch({&call, &block, &tensor, block.kv_head, begin, smaller(end, block.key_end)},
                     key_bytes(call, std::int64_t{heads} * columns));
}

/// Rows [begin, end) of the block's key head, a row at a time.
inline NextTile next_tile(const Call& call, const RowBlock& block, std::int64_t begin, std::int64_t end) {
  const auto rows = [&](const TensorView& tensor, int columns) {
    return prefetch_of_rows(call, block, tensor, columns, 1, begin, end);
  };
  const auto lines = [&](int columns) { return static_cast<int>((key_bytes(call, columns) + 63) / 64); };
  return {rows(call.k, call.key_columns()), rows(call.v, call.head_dim_v), lines(call.key_columns()),
          lines(call.head_dim_v)};
}

}  // namespace
}  // namespace flash_attention::cpu
