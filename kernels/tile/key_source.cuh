#pragma once

#include "tile/element.cuh"
#include "tile/sequence.cuh"

// The rows of K and V of a sequence: one stride apart, or in pages that a table lists. Both types have the same
// members, so that a kernel is written once.

namespace flash_attention::tile {

/// Rows of one head of one sequence in pages: row r is row (first + r) % page_size of page table[(first + r) / page_size].
/// Rows at or past `count` do not exist, and their entries of the table are never read.
template <typename Element>
struct PagedRows {
  Element* data;
  long long stride;       // from row to row of a page
  long long page_stride;  // from page to page
  const int* table;
  int page_size;
  // an entry of the table outside of [0, last_page] is a mistake that no check could see earlier: it must not read
  // outside of the memory
  int last_page;
  int first;
  int count;

  __device__ __forceinline__ Element* row(int r) const {
    const int j = first + r, page = max(0, min(table[j / page_size], last_page));
    return data + page * page_stride + j % page_size * stride;
  }
  __device__ __forceinline__ PagedRows from(int begin) const {
    PagedRows result = *this;
    result.first += begin;
    result.count -= begin;
    return result;
  }
};

/// Whether four elements of every row can be moved together.
template <typename Element>
__device__ __forceinline__ bool rows_move_by_four(const Rows<Element>& rows) {
  return moves_by_four(rows.data, rows.stride);
}
template <typename Element>
__device__ __forceinline__ bool rows_move_by_four(const PagedRows<Element>& rows) {
  return moves_by_four(rows.data, rows.stride) && moves_by_four(rows.data, rows.page_stride);
}

/// The visible keys of a sequence and key head in K or V.
template <typename Element, Features features>
__device__ __forceinline__ auto key_source(const AttentionArgs& args, const TensorView& view, const Sequence& sequence,
                                           int head_idx) {
  if constexpr (features.paged) {
    return PagedRows<Element>{static_cast<Element*>(view.data) + head_idx * view.head_stride,
                              view.seq_stride,
                              view.batch_stride,
                              args.page_table + sequence.batch_idx * args.page_table_stride,
                              args.page_size,
                              args.num_pages - 1,
                              0,
                              sequence.visible_kv};
  } else {
    auto rows = key_rows<Element, features>(view, sequence, head_idx);
    rows.count = sequence.visible_kv;
    return rows;
  }
}

}  // namespace flash_attention::tile
