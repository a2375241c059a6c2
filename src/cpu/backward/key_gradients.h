#pragma once

// Sums and stores dK and dV. If all rows of a key head go over its keys together, the keys are split over the threads
// instead of the rows. Then the sums of some keys stay in the cache, are complete after all rows, and are written at
// once; the splits share dQ (merge_dq.h).

#include "cpu/backward/merge_dq.h"

namespace flash_attention::cpu {
namespace {

/// Sums of dK and dV of the keys of a chunk, in a thread's own memory. 264 KB stay in an L2; the widest heads need more
/// for one block of keys.
struct KeySums {
  static constexpr long long one_block = block_kv * plan::cpu_sums_stride(max_head_dim, max_head_dim);
  static constexpr long long size = one_block > 66 << 10 ? one_block : 66 << 10;
  alignas(64) float data[size];
};

/// Sums of dK and dV from key `first` on. A row holds both.
struct KeyGradients {
  std::int64_t k_columns, row_stride;
  float* data;
  std::int64_t first = 0;

  /// In the workspace, for all keys of a head.
  KeyGradients(const Call& call, std::int64_t split, std::int64_t batch, int kv_head) : KeyGradients(call, nullptr, 0) {
    data = region<float>(call, plan::CpuRegion::key_gradients) + split * split_stride(call) +
           key_place(call, batch, kv_head, plan::cpu_key_unit) * plan::cpu_key_unit * stride();
  }
  KeyGradients(const Call& call, float* sums, std::int64_t first_key)
      : k_columns(plan::cpu_padded(call.head_dim)),
        row_stride(plan::cpu_sums_stride(call.head_dim, call.head_dim_v)),
        data(sums),
        first(first_key) {}

  /// The distance from the sums of one split to those of the next.
  std::int64_t split_stride(const Call& call) const {
    return call.heads_kv * key_places(call, plan::cpu_key_unit) * plan::cpu_key_unit * stride();
  }
  std::int64_t stride() const { return row_stride; }
  float* dK(std::int64_t key) const { return data + (key - first) * stride(); }
  float* dV(std::int64_t key) const { return dK(key) + k_columns; }
  void clear(std::int64_t count) const {
    for (std::int64_t i = 0; i < count * stride(); ++i) data[i] = 0;
  }
};

/// Writes dK and dV of the keys [first, last) from the sums of all splits. `sums` is those of the first split.
inline void write_key_gradients(const Call& call, std::int64_t batch, int kv_head, const KeyGradients& sums,
                                std::int64_t first, std::int64_t last, int num_splits) {
  const Sequence sequence(call, batch);
  const std::int64_t split_stride = sums.split_stride(call);
  const auto write = [&](const TensorView& tensor, int columns, float factor, const float* from) {
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      auto* to = reinterpret_cast<typename T::Stored*>(tensor.data) + batch * tensor.batch_stride +
                 (sequence.kv_begin + first) * tensor.seq_stride + kv_head * tensor.head_stride;
      for (std::int64_t key = first; key < last; ++key, from += sums.stride(), to += tensor.seq_stride) {
        for (int c = 0; c < columns; c += vector_lanes) {
          Vec sum = load(from + c);
          for (int split = 1; split < num_splits; ++split) sum += load(from + split * split_stride + c);
          store_some<T>(to + c, sum * factor, columns - c);
        }
      }
    });
  };
  write(call.dk, call.head_dim, call.scale, sums.dK(first));
  write(call.dv, call.head_dim_v, 1, sums.dV(first));
}

/// Row `key` of a tensor over the keys.
template <class T>
inline typename T::Stored* key_row(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t key) {
  return reinterpret_cast<typename T::Stored*>(block.key_row(call, tensor, key));
}

/// Clears dK and dV of keys that no row sees.
inline void clear_keys(const Call& call, const RowBlock& block, std::int64_t begin, std::int64_t end) {
  const auto clear = [&](const TensorView& tensor, int columns) {
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      auto* row = key_row<T>(call, block, tensor, begin);
      for (std::int64_t key = begin; key < end; ++key, row += tensor.seq_stride) {
        for (int c = 0; c < columns; c += vector_lanes) store_some<T>(row + c, Vec{}, columns - c);
      }
    });
  };
  clear(call.dk, call.head_dim);
  clear(call.dv, call.head_dim_v);
}

/// A key head and a split: of its blocks of rows, or of its keys.
struct KeyItem {
  std::int64_t batch;
  int kv_head, split;

  KeyItem(const Call& call, std::int64_t item)
      : batch(item / call.num_splits / call.heads_kv),
        kv_head(static_cast<int>(item / call.num_splits % call.heads_kv)),
        split(static_cast<int>(item % call.num_splits)) {}
};

inline std::int64_t backward_items(const Call& call) { return call.batch * call.heads_kv * call.num_splits; }

/// Narrows the keys of a block, or of a list of blocks, to one split. The first and the last split clear the keys that
/// no row sees.
template <class Block>
inline void take_keys(const Call& call, int split, const RowBlock& head, Block& block) {
  if (block.key_end <= block.key_begin) block.key_begin = block.key_end = 0;
  if (split == 0) clear_keys(call, head, 0, block.key_begin);
  if (split == call.num_splits - 1) clear_keys(call, head, block.key_end, head.sequence.kv_rows);
  take_split(call, split, block_kv, block);
}

/// Calls add(sums) with the block's keys narrowed to one chunk after another, and writes dK and dV of each chunk.
template <class Block, class Add>
inline void for_key_sums(const Call& call, const RowBlock& head, Block& block, KeySums& memory, Add add) {
  const std::int64_t most = KeySums::size / KeyGradients(call, nullptr, 0).stride() / block_kv * block_kv;
  const std::int64_t end = block.key_end;
  for (std::int64_t begin = block.key_begin; begin < end; begin += most) {
    const KeyGradients sums(call, memory.data, begin);
    block.key_begin = begin;
    block.key_end = smaller(begin + most, end);
    sums.clear(round_up(static_cast<int>(block.key_end - begin), block_kv));
    add(sums);
    write_key_gradients(call, head.batch, head.kv_head, sums, begin, block.key_end, 1);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
