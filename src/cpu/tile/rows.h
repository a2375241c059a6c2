#pragma once

// A block of query rows, one a lane. If several query heads share a key head their rows are stacked: row r of the stack
// is query r / stack of head first_head + r % stack. So neighbouring lanes see nearly the same keys.

#include "cpu/call.h"
#include "cpu/region.h"
#include "cpu/tile/element.h"
#include "plan/families/cpu_tiles.h"
#include "plan/key_bounds.h"

namespace flash_attention::cpu {
namespace {

constexpr int max_head_dim = plan::cpu_max_head_dim;
constexpr int max_blocks = plan::cpu_blocks_together;
constexpr int block_vectors = block_q / vector_lanes;

template <class T>
FLASH_ATTENTION_INLINE constexpr T smaller(T x, T y) {
  return x < y ? x : y;
}
template <class T>
FLASH_ATTENTION_INLINE constexpr T larger(T x, T y) {
  return x > y ? x : y;
}

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

/// One sequence of the batch: its place, and the part of it that is in use. docs/numerics.md.
struct Sequence {
  std::int64_t q_begin = 0, kv_begin = 0;  // in a packed tensor
  std::int64_t q_rows, kv_rows;            // of the tensor
  std::int64_t q_used, kv_used;
  std::int64_t keys_visible;  // at most kv_used

  Sequence(const Call& call, std::int64_t batch) : q_rows(call.seq_q), kv_rows(call.seq_kv) {
    if (call.cu_seqlens_q != nullptr) {
      q_begin = call.cu_seqlens_q[batch];
      q_rows = call.cu_seqlens_q[batch + 1] - q_begin;
    }
    if (call.cu_seqlens_kv != nullptr) {
      kv_begin = call.cu_seqlens_kv[batch];
      kv_rows = call.cu_seqlens_kv[batch + 1] - kv_begin;
    }
    q_used = call.seqused_q != nullptr ? smaller<std::int64_t>(call.seqused_q[batch], q_rows) : q_rows;
    kv_used = call.seqused_kv != nullptr ? smaller<std::int64_t>(call.seqused_kv[batch], kv_rows) : kv_rows;
    keys_visible = call.key_lengths != nullptr ? smaller<std::int64_t>(call.key_lengths[batch], kv_used) : kv_used;
    keys_visible = larger<std::int64_t>(keys_visible, 0);
  }
};

struct RowBlock {
  std::int64_t batch;
  int kv_head;
  Sequence sequence;
  int rows = 0;     // 0: nothing to do
  int vectors = 0;  // lanes in use: vectors * vector_lanes >= rows. Lanes past the rows repeat the last one
  std::int32_t query[block_q], head[block_q];
  alignas(64) std::int32_t begin[block_q], end[block_q];  // the keys that a lane sees, before the boolean mask
  bool unused[block_q];                                   // a row past seqused_q
  std::int64_t vector_begin[block_vectors],
      vector_end[block_vectors];              // the same for the keys that some lane of a vector sees
  std::int64_t key_begin = 0, key_end = 0;    // seen by any lane
  std::int64_t full_begin = 0, full_end = 0;  // seen by all lanes

  RowBlock(const Call& call, std::int64_t batch_idx, int first_head, int stack, std::int64_t first_row)
      : batch(batch_idx), kv_head(first_head / call.group), sequence(call, batch_idx) {
    const std::int64_t left = sequence.q_rows * stack - first_row;
    if (left <= 0) return;
    rows = static_cast<int>(smaller<std::int64_t>(left, block_q));
    vectors = round_up(rows, lane_multiple) / vector_lanes;
    key_begin = full_end = sequence.kv_rows;
    for (int v = 0; v < vectors; ++v) vector_begin[v] = sequence.kv_rows, vector_end[v] = 0;
    std::int32_t row_query = static_cast<std::int32_t>(first_row / stack), member = static_cast<int>(first_row % stack);
    for (int lane = 0; lane < vectors * vector_lanes; ++lane) {
      query[lane] = row_query;
      head[lane] = first_head + member;
      if (lane + 1 < rows && ++member == stack) member = 0, ++row_query;
      find_keys(call, lane);
      full_begin = larger<std::int64_t>(full_begin, begin[lane]);
      full_end = smaller<std::int64_t>(full_end, end[lane]);
      if (begin[lane] >= end[lane]) continue;
      key_begin = smaller<std::int64_t>(key_begin, begin[lane]);
      key_end = larger<std::int64_t>(key_end, end[lane]);
      std::int64_t &first = vector_begin[lane / vector_lanes], &last = vector_end[lane / vector_lanes];
      first = smaller<std::int64_t>(first, begin[lane]);
      last = larger<std::int64_t>(last, end[lane]);
    }
    const int unit = call.invariant ? block_kv : 16;  // dropout's bits are in groups of 16 keys
    key_begin = key_begin / unit * unit;
  }

  int lanes() const { return vectors * vector_lanes; }

  ProgramRows program_rows() const { return {batch, head, query, lanes()}; }

  /// The same rows of another key head.
  void move_to(const Call& call, int other_kv_head) {
    const int heads = (other_kv_head - kv_head) * call.group;
    for (int lane = 0; lane < lanes(); ++lane) head[lane] += heads;
    kv_head = other_kv_head;
  }

  /// The address of row `lane` of a tensor over the query heads.
  FLASH_ATTENTION_INLINE char* row(const Call& call, const TensorView& tensor, int lane) const {
    return tensor.data + row_offset(tensor, lane) * bytes_of(call.dtype);
  }
  FLASH_ATTENTION_INLINE std::int64_t row_offset(const TensorView& tensor, int lane) const {
    return batch * tensor.batch_stride + (sequence.q_begin + query[lane]) * tensor.seq_stride +
           head[lane] * tensor.head_stride;
  }

  /// The row of key j of the block's key head. All reads of K and V, in pages or not, use this.
  FLASH_ATTENTION_INLINE char* key_row(const Call& call, const TensorView& tensor, std::int64_t j) const {
    return key_row(call, tensor, j, kv_head);
  }
  FLASH_ATTENTION_INLINE char* key_row(const Call& call, const TensorView& tensor, std::int64_t j, int of_head) const {
    std::int64_t entry = batch, row = sequence.kv_begin + j;
    if (call.page_table != nullptr) {
      entry = call.page_table[batch * call.page_table_stride + j / call.page_size];
      row = j % call.page_size;
    }
    return tensor.data + (entry * tensor.batch_stride + row * tensor.seq_stride + of_head * tensor.head_stride) *
                             bytes_of(call.kv_dtype);
  }

  /// Where the scales of key j's groups begin.
  FLASH_ATTENTION_INLINE std::int64_t group_row(const Call& call, const GroupView& groups, std::int64_t j) const {
    std::int64_t entry = batch, row = sequence.kv_begin + j;
    if (call.page_table != nullptr) {
      entry = call.page_table[batch * call.page_table_stride + j / call.page_size];
      row = j % call.page_size;
    } else if (call.cu_seqlens_kv != nullptr) {
      entry = 0;
    }
    return entry * groups.batch_stride + row * groups.seq_stride + kv_head * groups.head_stride;
  }

  /// The number of keys from j on that are one stride apart.
  FLASH_ATTENTION_INLINE std::int64_t keys_together(const Call& call, std::int64_t j) const {
    return call.page_table != nullptr ? call.page_size - j % call.page_size : sequence.kv_rows - j;
  }

  /// The place of the lane's row in lse, which is also its number among all rows of the call.
  FLASH_ATTENTION_INLINE std::int64_t row_idx(const Call& call, int lane) const {
    if (call.cu_seqlens_q != nullptr) return head[lane] * call.total_q + sequence.q_begin + query[lane];
    return (batch * call.heads_q + head[lane]) * call.seq_q + query[lane];
  }

 private:
  void find_keys(const Call& call, int lane) {
    const std::int64_t diagonal = query[lane] + (call.top_left ? 0 : sequence.kv_used - sequence.q_used);
    std::int64_t first = call.left_padding != nullptr ? call.left_padding[batch] : 0, last = sequence.keys_visible;
    if (call.window_left >= 0) first = larger<std::int64_t>(first, diagonal - call.window_left);
    if (call.window_right >= 0) last = smaller<std::int64_t>(last, diagonal + call.window_right + 1);
    if (call.sequence_windows != nullptr) {
      const std::int64_t left = call.sequence_windows[2 * batch], right = call.sequence_windows[2 * batch + 1];
      if (left >= 0) first = larger<std::int64_t>(first, diagonal - left);
      if (right >= 0) last = smaller<std::int64_t>(last, diagonal + right + 1);
    }
    if (call.chunk > 0) {
      const std::int64_t padding = call.left_padding != nullptr ? call.left_padding[batch] : 0;
      const std::int64_t chunk = abi::chunk_begin(diagonal, padding, call.chunk);
      first = larger<std::int64_t>(first, chunk);
      last = smaller<std::int64_t>(last, chunk + call.chunk);
    }
    unused[lane] = query[lane] >= sequence.q_used;
    if (unused[lane] || first >= last) first = last = 0;
    begin[lane] = static_cast<std::int32_t>(first);
    end[lane] = static_cast<std::int32_t>(last);
  }
};

/// The number of places for tiles of `unit` keys of one key head, over all sequences.
inline std::int64_t key_places(const Call& call, int unit) {
  return plan::cpu_places(call.cu_seqlens_kv != nullptr, call.batch, call.seq_kv, call.total_kv, unit);
}

/// The place of the first tile of a sequence and key head.
inline std::int64_t key_place(const Call& call, std::int64_t batch, int kv_head, int unit) {
  const bool packed = call.cu_seqlens_kv != nullptr;
  const std::int64_t first = packed ? call.cu_seqlens_kv[batch] / unit + batch : batch * ceil_div(call.seq_kv, unit);
  return kv_head * key_places(call, unit) + first;
}

/// Blocks of stacked rows for one key head of one batch entry.
inline std::int64_t blocks_per_head(const Call& call) { return ceil_div(call.seq_q * call.group, block_q); }

/// Blocks of one key head that go over the keys together (call.blocks_together), so that a tile of keys is read once
/// from a distant memory for all of them.
struct BlockList {
  RowBlock blocks[max_blocks];
  int count = 0;
  std::int64_t key_begin = 0, key_end = 0;  // seen by any block

  /// Block `first` and the blocks that follow in steps of `step`.
  BlockList(const Call& call, std::int64_t batch, int kv_head, std::int64_t first, std::int64_t step)
      : blocks{block_at(call, batch, kv_head, first, step, 0), block_at(call, batch, kv_head, first, step, 1),
               block_at(call, batch, kv_head, first, step, 2), block_at(call, batch, kv_head, first, step, 3)} {
    for (; count < max_blocks && blocks[count].rows > 0; ++count) {
      const RowBlock& block = blocks[count];
      key_begin = count == 0 ? block.key_begin : smaller(key_begin, block.key_begin);
      key_end = larger(key_end, block.key_end);
    }
  }
  const RowBlock& operator[](int idx) const { return blocks[idx]; }

 private:
  static RowBlock block_at(const Call& call, std::int64_t batch, int kv_head, std::int64_t first, std::int64_t step,
                           int idx) {
    const std::int64_t block = idx < call.blocks_together ? first + idx * step : blocks_per_head(call);
    return {call, batch, kv_head * call.group, call.group, block * block_q};
  }
};

}  // namespace
}  // namespace flash_attention::cpu
