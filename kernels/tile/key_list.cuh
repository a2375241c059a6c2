#pragma once

#include "ptx/warp.cuh"
#include "tile/product.cuh"
#include "tile/visibility.cuh"

// Lists of keys (docs/numerics.md, "Lists of keys"): which rows share a list, and which keys its entries name.

namespace flash_attention::tile {

/// How rows share lists. A stack is all rows that may share one: `queries` neighbouring queries times the heads of a
/// list.
struct ListShape {
  int heads;      // of the grid: key heads, or query heads if each has its own lists
  int stacked;    // query heads that share a list and a key head
  int own_heads;  // 1 if each of `heads` has its own lists, 0 if all share them

  __device__ __forceinline__ explicit ListShape(const AttentionArgs& args) {
    const bool by_query_head = args.list_heads == args.heads_q && args.heads_q != args.heads_kv;
    heads = by_query_head ? args.heads_q : args.heads_kv;
    stacked = by_query_head ? 1 : args.group;
    own_heads = args.list_heads > 1 ? 1 : 0;
  }
};

/// One list of one sequence.
struct KeyListView {
  const int* entries;
  int count;

  /// `row` counts the lists of a sequence, `head` the heads of the lists.
  __device__ __forceinline__ KeyListView(const AttentionArgs& args, const Sequence& sequence, bool packed, int row,
                                         int head)
      : KeyListView(args, ((packed ? sequence.start_q
                                   : sequence.batch_idx * static_cast<long long>(ceil_div(args.seq_q, args.list_block_q))) +
                           row) * args.list_heads + head) {}
  /// List `idx` of all.
  __device__ __forceinline__ KeyListView(const AttentionArgs& args, long long idx) {
    entries = args.key_list + idx * args.list_entries;
    count = args.list_entries;
    if (args.key_counts != nullptr) count = max(0, min(args.key_counts[idx], args.list_entries));
  }

  /// The key or block of entry e, or -1 if it names none: it is outside of [0, limit), or, in a set, an earlier entry
  /// names the same.
  template <bool set>
  __device__ __forceinline__ int entry(int e, int limit) const {
    const int value = entries[e];
    if (value < 0 || value >= limit) return -1;
    if constexpr (set) {
      for (int before = 0; before < e; ++before) {
        if (entries[before] == value) return -1;
      }
    }
    return value;
  }
};

/// Rows that share a list, with the `stacked` heads of a query side by side: row r of the stack is query q_begin + r /
/// stacked of head first_head + r % stacked.
struct ListRows {
  int q_begin;
  int first_head;
  int stacked;
  int first;  // row of the stack
  int count;  // rows that exist

  __device__ __forceinline__ int query(int r) const { return q_begin + (first + r) / stacked; }
  __device__ __forceinline__ int head(int r) const { return first_head + (first + r) % stacked; }
};

/// The work of a thread block that owns rows: up to block_rows rows that share a list. If a sequence has none there,
/// rows.count is 0 or less.
struct ListTask {
  Sequence sequence;
  int list_row, list_head;  // of the list
  ListRows rows;
};

template <Features features>
__device__ __forceinline__ ListTask list_task(const AttentionArgs& args) {
  const ListShape shape(args);
  const int chunks = ceil_div(args.list_block_q * shape.stacked, block_rows);
  const int list_rows = ceil_div(args.seq_q, args.list_block_q);
  const int chunk = blockIdx.x % chunks, unit = blockIdx.x / chunks;
  const int list_row = unit / shape.heads % list_rows, head = unit % shape.heads;
  const Sequence sequence = make_sequence<features>(args, unit / shape.heads / list_rows);
  const int first = chunk * block_rows, q_begin = list_row * args.list_block_q;
  const int queries = min(args.list_block_q, sequence.rows_q - q_begin);
  const ListRows rows{q_begin, head * shape.stacked, shape.stacked, first,
                      min(block_rows, queries * shape.stacked - first)};
  return {sequence, list_row, head * shape.own_heads, rows};
}

/// These rows of a tensor over the query heads.
template <typename Element>
struct StackedRows {
  Element* data;  // of query 0, head 0
  long long stride;
  long long head_stride;
  ListRows rows;
  int count;

  __device__ __forceinline__ Element* row(int r) const {
    return data + rows.query(r) * stride + rows.head(r) * head_stride;
  }
};

template <typename Element, Features features>
__device__ __forceinline__ StackedRows<Element> stacked_rows(const TensorView& view, const Sequence& sequence,
                                                             const ListRows& rows) {
  const auto all = query_rows<Element, features>(view, sequence, 0);
  return {all.data, view.seq_stride, view.head_stride, rows, rows.count};
}

template <typename Element>
__device__ __forceinline__ bool rows_move_by_four(const StackedRows<Element>& rows) {
  return moves_by_four(rows.data, rows.stride) && moves_by_four(rows.data, rows.head_stride);
}

/// The rows of K or V that a tile of keys names. An entry that is no key reads the first key: its score is hidden.
template <typename Source>
struct GatheredRows {
  Source source;
  const int* keys;
  int count;

  __device__ __forceinline__ auto row(int r) const { return source.row(max(keys[r], 0)); }
};

template <typename Source>
__device__ __forceinline__ bool rows_move_by_four(const GatheredRows<Source>& rows) {
  return rows_move_by_four(rows.source);
}

/// A tile of the keys of a list, in shared memory.
struct KeyTile {
  int key[block_rows];  // -1: no key
  unsigned some[2];     // for each half, whether it has any key
};

/// The number of keys of a list: the keys of its blocks, side by side.
__device__ __forceinline__ long long listed_keys(const AttentionArgs& args, const KeyListView& list) {
  return static_cast<long long>(list.count) * args.list_block_kv;
}

/// Finds 64 keys of a list from place `begin` on, of those in [first, last). Returns false if none of them is a key.
/// All threads of a block call it. It ends with a barrier.
template <Features features>
__device__ __forceinline__ bool find_keys(const AttentionArgs& args, const KeyListView& list, long long begin, int len_kv,
                                          int first, int last, KeyTile& tile) {
  __syncthreads();  // all threads are done with the tile before
  if (threadIdx.x < block_rows) {
    const long long place = begin + threadIdx.x;
    int key = -1;
    if (place < listed_keys(args, list)) {
      const int size = args.list_block_kv;
      const int entry = list.template entry<features.key_set>(static_cast<int>(place / size), ceil_div(len_kv, size));
      if (entry >= 0) key = static_cast<int>(entry * static_cast<long long>(size) + place % size);
      if (key < first || key >= last) key = -1;
    }
    tile.key[threadIdx.x] = key;
    const unsigned some = ptx::ballot(key >= 0);
    if (threadIdx.x % 32 == 0) tile.some[threadIdx.x / 32] = some;
  }
  __syncthreads();  // the keys are written
  return (tile.some[0] | tile.some[1]) != 0;
}

}  // namespace flash_attention::tile
