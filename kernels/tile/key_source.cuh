#pragma once

#include "tile/element.cuh"
#include "tile/groups.cuh"
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

/// Rows of codes of 4 bits, with the scales and zeros of their groups: each is a tensor with rows of its own.
template <Features features, typename Codes, typename Scales>
struct GroupRows {
  Codes codes;
  Scales scales;
  Scales zeros;
  int count;

  __device__ __forceinline__ GroupRow<features> row(int r) const {
    const auto* of_zeros = features.kv_dtype == Type::int4 ? zeros.row(r) : nullptr;
    return {codes.row(r), scales.row(r), of_zeros};
  }
  __device__ __forceinline__ GroupRows from(int first) const {
    return {codes.from(first), scales.from(first), zeros.from(first), count - first};
  }
};
template <Features features, typename Codes, typename Scales>
__device__ __forceinline__ bool rows_move_by_four(const GroupRows<features, Codes, Scales>&) {
  return true;
}

/// key_source of K or V, whatever their elements are.
template <Features features>
__device__ __forceinline__ auto keys_or_values(const AttentionArgs& args, const TensorView& view, const GroupView& groups,
                                               const Sequence& sequence, int head_idx) {
  if constexpr (has_groups(features.kv_dtype)) {
    using Scale = const GroupScale<features>;
    const auto strides = [&](void* data) {
      return TensorView{data, groups.batch_stride, groups.seq_stride, groups.head_stride};
    };
    const auto codes = key_source<const unsigned char, features>(args, view, sequence, head_idx);
    const auto scales = key_source<Scale, features>(args, strides(groups.scales), sequence, head_idx);
    const auto zeros = key_source<Scale, features>(args, strides(groups.zeros), sequence, head_idx);
    return GroupRows<features, decltype(codes), decltype(scales)>{codes, scales, zeros, codes.count};
  } else {
    return key_source<const Stored<key_type(features)>, features>(args, view, sequence, head_idx);
  }
}
template <Features features>
__device__ __forceinline__ auto keys_of(const AttentionArgs& args, const Sequence& sequence, int kv_head_idx) {
  return keys_or_values<features>(args, args.K, args.K_groups, sequence, kv_head_idx);
}
template <Features features>
__device__ __forceinline__ auto values_of(const AttentionArgs& args, const Sequence& sequence, int kv_head_idx) {
  return keys_or_values<features>(args, args.V, args.V_groups, sequence, kv_head_idx);
}

}  // namespace flash_attention::tile
