#pragma once

#include "abi/append.h"

// Where a new row belongs: its sequence, its place in the cache, the position of its angle.

namespace flash_attention::decode {

using namespace abi;

struct Token {
  bool exists = false;
  int batch_idx = 0;
  long long batch = 0;  // of the tensor that it comes from; 0 where rows are end to end
  long long row = 0;
  long long position = 0;
  long long angle = 0;
};

/// A row of the cache. The page is the sequence if there are no pages.
struct Slot {
  bool exists = false;
  long long page = 0;
  long long row = 0;
};

/// The last sequence that begins at or before the row.
__device__ __forceinline__ int sequence_of(const int* starts, int batch, long long row) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// `same_angle`: all tokens of a sequence have the angle of its first.
__device__ __forceinline__ Token token_of(const AppendArgs& args, long long idx, const int* starts, int seq,
                                          bool same_angle) {
  Token token;
  token.exists = true;
  token.row = idx;
  if (args.sequences != nullptr) {
    token.batch_idx = args.sequences[idx];
    token.position = token.angle = args.positions[idx];
    token.exists = token.batch_idx >= 0 && token.batch_idx < args.batch;
    return token;
  }
  long long first = 0;
  if (starts != nullptr) {
    token.batch_idx = sequence_of(starts, args.batch, idx);
    first = starts[token.batch_idx];
    token.exists = idx >= first && idx < starts[token.batch_idx + 1];
  } else {
    token.batch_idx = static_cast<int>(idx / seq);
    token.batch = token.batch_idx;
    token.row = idx % seq;
  }
  const long long step = token.row - first;
  const long long length = args.lengths != nullptr ? args.lengths[token.batch_idx] : 0;
  token.position = length + step;
  token.angle = (args.rotary_offsets != nullptr ? args.rotary_offsets[token.batch_idx] : length) + (same_angle ? 0 : step);
  return token;
}

__device__ __forceinline__ long long offset_of(const TensorView& view, const Token& token, int head_idx) {
  return token.batch * view.batch_stride + token.row * view.seq_stride + head_idx * view.head_stride;
}

/// Nothing outside of the cache, nor of the table, is touched.
template <bool paged>
__device__ __forceinline__ Slot slot_of(const AppendArgs& args, const Token& token) {
  if (!token.exists || token.position < 0 || token.position >= args.capacity) return {};
  if constexpr (paged) {
    const int position = static_cast<int>(token.position);
    const int page = args.page_table[token.batch_idx * args.page_table_stride + position / args.page_size];
    return {page >= 0 && page < args.num_pages, page, position % args.page_size};
  } else {
    return {true, token.batch_idx, token.position};
  }
}

}  // namespace flash_attention::decode
