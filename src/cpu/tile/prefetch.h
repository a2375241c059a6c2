#pragma once

// Prefetch of the rows of K and V that are read next. In a [seq, heads, dim] tensor the rows of a head are far apart, and
// the hardware does not see them coming.

#include "cpu/tile/rows.h"

namespace flash_attention::cpu {
namespace {

/// Prefetches rows that are read soon, a few cache lines at a time.
struct RowPrefetch {
  const char* row;
  std::int64_t stride;  // bytes
  std::int64_t width;   // bytes of a row
  std::int64_t rows;
  std::int64_t at = 0;

  RowPrefetch(const char* first, std::int64_t row_stride, std::int64_t row_width, std::int64_t num_rows)
      : row(first), stride(row_stride), width(row_width), rows(num_rows) {
    if (stride == width && rows > 0) width *= rows, rows = 1;  // one after the other
  }

  FLASH_ATTENTION_INLINE void prefetch(int lines) {
    if (rows == 0) return;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(row + at + 64 * i, 0, 2);
    at += 64 * lines;
    if (at < width) return;
    at = 0;
    row += stride;
    --rows;
  }
};

/// Whether K and V are more than the caches keep: a prefetch of what is near costs as much as reading it.
inline bool exceeds_cache(const Call& call) {
  return call.seq_kv * call.heads_kv * (call.head_dim + call.head_dim_v) * size_of(call.key_element) >
         call.cache_resident_bytes;
}

/// The tile after the present one: prefetched bit by bit, while this one is worked on.
struct NextTile {
  RowPrefetch K, V;
  int key_lines, value_lines;  // to prefetch with each step of the scores, and of the sums

  bool is_wanted() const { return K.rows > 0 || V.rows > 0; }
  FLASH_ATTENTION_INLINE void prefetch_keys() { K.prefetch(key_lines); }
  FLASH_ATTENTION_INLINE void prefetch_values() { V.prefetch(value_lines); }
};

/// Rows [begin, end) of `heads` key heads, from the block's on, that are side by side; of pages those of the first.
inline RowPrefetch prefetch_of_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns,
                                    int heads, std::int64_t begin, std::int64_t end) {
  const int size = size_of(call.key_element);
  const std::int64_t stride = tensor.seq_stride * size;
  const std::int64_t rows = larger<std::int64_t>(smaller(end, block.key_end) - begin, 0);
  if (rows == 0) return RowPrefetch(nullptr, 0, 0, 0);  // the table may end here
  return RowPrefetch(block.key_row(call, tensor, begin), stride, heads * columns * size,
                     smaller(rows, block.keys_together(call, begin)));
}

/// Rows [begin, end) of the block's key head, a row at a time.
inline NextTile next_tile(const Call& call, const RowBlock& block, std::int64_t begin, std::int64_t end) {
  const auto rows = [&](const TensorView& tensor, int columns) {
    return prefetch_of_rows(call, block, tensor, columns, 1, begin, end);
  };
  const auto lines = [&](int columns) { return (columns * size_of(call.key_element) + 63) / 64; };
  return {rows(call.k, call.key_columns()), rows(call.v, call.head_dim_v), lines(call.key_columns()),
          lines(call.head_dim_v)};
}

}  // namespace
}  // namespace flash_attention::cpu
