#pragma once

#include "abi/args.h"
#include "abi/config.h"
#include "tile/math.cuh"

// The place of a sequence of the batch, and its lengths.

namespace flash_attention::tile {

using namespace abi;

/// Rows of a query. If heads are stacked (Features::stacked_heads), the rows of a query are those of the heads that share
/// its keys, side by side and filled up to a power of two: row r is of query r / rows_of_query.
template <Features features>
constexpr int rows_of_query = features.stacked_heads == 0 ? 1 : features.stacked_heads;

struct Sequence {
  int batch_idx;
  int rows_q;  // rows that the tensors hold for this sequence
  int rows_kv;
  int len_q;  // Lq and Lk of docs/numerics.md: the rows in use
  int len_kv;
  int visible_kv;     // keys at or past it are hidden from every query
  int first_kv;       // keys before it are hidden from every query
  long long start_q;  // first row in a packed tensor, otherwise 0
  long long start_kv;
};

template <Features features>
__device__ __forceinline__ Sequence make_sequence(const AttentionArgs& args, int batch_idx) {
  Sequence sequence{batch_idx, args.seq_q, args.seq_kv, 0, 0, 0, 0, 0, 0};
  if constexpr (features.packed) {
    sequence.start_q = args.cu_seqlens_q[batch_idx];
    sequence.rows_q = static_cast<int>(args.cu_seqlens_q[batch_idx + 1] - sequence.start_q);
  }
  if constexpr (features.packed && !features.paged) {
    sequence.start_kv = args.cu_seqlens_kv[batch_idx];
    sequence.rows_kv = static_cast<int>(args.cu_seqlens_kv[batch_idx + 1] - sequence.start_kv);
  }
  sequence.len_q = sequence.rows_q;
  sequence.len_kv = sequence.rows_kv;
  if constexpr (features.seqused_q) sequence.len_q = max(0, min(sequence.rows_q, args.seqused_q[batch_idx] * rows_of_query<features>));
  if constexpr (features.seqused_kv) sequence.len_kv = max(0, min(sequence.rows_kv, args.seqused_kv[batch_idx]));
  sequence.visible_kv = sequence.len_kv;
  if constexpr (features.key_lengths) sequence.visible_kv = max(0, min(sequence.len_kv, args.key_lengths[batch_idx]));
  if constexpr (features.left_padding) sequence.first_kv = max(0, args.left_padding[batch_idx]);
  return sequence;
}

/// Rows of one head of one sequence: row r begins at data + r * stride. Rows at or past `count` do not exist.
template <typename Element>
struct Rows {
  Element* data;
  long long stride;
  int count;

  __device__ __forceinline__ Element* row(int r) const { return data + r * stride; }
  __device__ __forceinline__ Rows from(int first) const { return {data + first * stride, stride, count - first}; }
  static constexpr bool may_have_gaps = false;
};

/// The rows of stacked heads: row r of the stack is of head r % stack.
template <typename Element, int stack>
struct RowsOfStack {
  Element* data;
  long long stride;       // of queries
  long long head_stride;
  int count;
  int group;      // heads that there are
  int first = 0;  // row of the stack

  __device__ __forceinline__ Element* row(int r) const {
    return data + (first + r) / stack * stride + (first + r) % stack * head_stride;
  }
  __device__ __forceinline__ RowsOfStack from(int begin) const {
    return {data, stride, head_stride, count - begin, group, first + begin};
  }
  static constexpr bool may_have_gaps = true;
  /// Whether row r only fills up a stack.
  __device__ __forceinline__ bool is_gap(int r) const { return (first + r) % stack >= group; }
};

/// Whether a row is of a head: not if it only fills up a stack.
template <Features features>
__device__ __forceinline__ bool has_head(const AttentionArgs& args, int row) {
  return features.stacked_heads == 0 || row % rows_of_query<features> < args.stacked_group;
}

/// The first element of a sequence and head in a tensor whose rows begin at `start`.
template <Features features>
__device__ __forceinline__ long long offset_of(const TensorView& view, int batch_idx, long long start, int head_idx) {
  const long long sequence_offset = features.packed ? start * view.seq_stride : batch_idx * view.batch_stride;
  return sequence_offset + head_idx * view.head_stride;
}

template <typename Element, Features features>
__device__ __forceinline__ Rows<Element> query_rows(const TensorView& view, const Sequence& sequence, int head_idx) {
  const long long offset = offset_of<features>(view, sequence.batch_idx, sequence.start_q, head_idx);
  return {static_cast<Element*>(view.data) + offset, view.seq_stride, sequence.rows_q};
}

/// The same, also of stacked heads.
template <typename Element, Features features>
__device__ __forceinline__ auto query_rows(const AttentionArgs& args, const TensorView& view, const Sequence& sequence,
                                           int head_idx) {
  if constexpr (features.stacked_heads == 0) {
    return query_rows<Element, features>(view, sequence, head_idx);
  } else {
    const long long offset =
        offset_of<features>(view, sequence.batch_idx, sequence.start_q, head_idx * args.stacked_group);
    return RowsOfStack<Element, rows_of_query<features>>{static_cast<Element*>(view.data) + offset, view.seq_stride,
                                                         view.head_stride, sequence.rows_q, args.stacked_group};
  }
}

template <typename Element, Features features>
__device__ __forceinline__ Rows<Element> key_rows(const TensorView& view, const Sequence& sequence, int head_idx) {
  const long long offset = offset_of<features>(view, sequence.batch_idx, sequence.start_kv, head_idx);
  return {static_cast<Element*>(view.data) + offset, view.seq_stride, sequence.rows_kv};
}

/// The place of the first row statistic (lse, dlse, delta) of a sequence and head.
template <Features features>
__device__ __forceinline__ long long statistics_offset(const AttentionArgs& args, const Sequence& sequence, int head_idx) {
  if constexpr (features.packed) return static_cast<long long>(head_idx) * args.total_q + sequence.start_q;
  if constexpr (features.stacked_heads != 0)  // the heads of a stack follow each other
    return (static_cast<long long>(sequence.batch_idx) * args.heads_q + head_idx) * args.stacked_group *
           (args.seq_q / rows_of_query<features>);
  return (static_cast<long long>(sequence.batch_idx) * args.heads_q + head_idx) * args.seq_q;
}

/// The place of row i from there on.
template <Features features>
__device__ __forceinline__ long long statistic_of(const AttentionArgs& args, long long i) {
  constexpr int stack = rows_of_query<features>;
  if constexpr (stack == 1) return i;
  return i % stack * (args.seq_q / stack) + i / stack;
}

/// The place of the first key mass of a sequence and head.
template <Features features>
__device__ __forceinline__ long long key_mass_offset(const AttentionArgs& args, const Sequence& sequence, int head_idx) {
  if constexpr (features.packed) return static_cast<long long>(head_idx) * args.total_kv + sequence.start_kv;
  return (static_cast<long long>(sequence.batch_idx) * args.heads_q + head_idx) * args.seq_kv;
}

/// The tile of a block of a one-dimensional grid. The tile index runs fastest. Under a causal mask the last query tile
/// and the first key tile have the most work, so they start first.
struct BlockCoordinates {
  int tile_idx;
  int head_idx;
  int batch_idx;
};

/// Under a causal mask tiles differ in work. If the tile index ran fastest through the whole grid, a tile with much
/// work might start last, and all others would have to wait for it. So heads are taken in groups, and within a group
/// the tiles with most work start first, those of all heads. A group is as many heads as L2 has room for (`seq`: rows
/// of a head that its blocks share).
template <Features features>
__device__ __forceinline__ int by_work(int block_idx, int num_blocks, int num_tiles, int seq) {
  constexpr int rows_in_cache = 32768;  // 16 MB of K and V at 128 columns of 16 bits: an A100 has 40 MB of L2, an H200 50
  if constexpr (!features.window_right || features.window_left) return block_idx;
  const int group = max(1, rows_in_cache / max(1, seq)), first = block_idx / (group * num_tiles) * group;
  const int heads = min(group, num_blocks / num_tiles - first), rest = block_idx - first * num_tiles;
  return (first + rest % heads) * num_tiles + rest / heads;
}

__device__ __forceinline__ BlockCoordinates query_block(int block_idx, int num_tiles, int num_heads) {
  const int rest = block_idx / num_tiles;
  return {num_tiles - 1 - block_idx % num_tiles, rest % num_heads, rest / num_heads};
}

__device__ __forceinline__ BlockCoordinates key_block(int block_idx, int num_tiles, int num_heads) {
  const int rest = block_idx / num_tiles;
  return {block_idx % num_tiles, rest % num_heads, rest / num_heads};
}

}  // namespace flash_attention::tile
