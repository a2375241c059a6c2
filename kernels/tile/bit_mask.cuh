#pragma once

#include "tile/sequence.cuh"

// Bit masks: one bit for each key that a query may see. docs/numerics.md, "Masks of bits".

namespace flash_attention::tile {

/// The bits of one sequence.
template <Features features>
struct SequenceBits {
  __device__ __forceinline__ SequenceBits(const AttentionArgs&, const Sequence&) {}
};

template <Features features>
requires(features.bit_mask()) struct SequenceBits<features> {
  const unsigned char* bytes;  // null: the sequence has no mask
  int count;                   // of bytes, with offsets
  int row;                     // the distance from a query to the next: in keys for bits, in bytes for drafts
  int first;                   // the key of a row's first bit; keys before it are visible

  __device__ __forceinline__ SequenceBits(const AttentionArgs& args, const Sequence& sequence)
      : bytes(args.bit_mask),
        row(features.draft_bits ? args.bit_row_bytes : sequence.len_kv),
        first(features.draft_bits ? sequence.len_kv - sequence.len_q : 0) {
    if constexpr (features.bit_offsets) {
      const int begin = args.bit_offsets[sequence.batch_idx];
      count = args.bit_offsets[sequence.batch_idx + 1] - begin;
      bytes = count > 0 ? bytes + begin : nullptr;
    } else {
      bytes += (features.packed ? sequence.start_q : static_cast<long long>(sequence.batch_idx) * args.seq_q) * row;
    }
  }

  /// Whether query i sees key j. Missing bits hide.
  __device__ __forceinline__ bool shows(int i, int j) const {
    const int column = j - first;
    if ((features.bit_offsets && bytes == nullptr) || column < 0) return true;
    if constexpr (features.draft_bits) {
      const int at = i * row + (column >> 3);
      if (column >> 3 >= row || (features.bit_offsets && at >= count)) return false;
      return (bytes[at] >> (column & 7) & 1) != 0;
    }
    const long long bit = static_cast<long long>(i) * row + column;
    if (bit >> 3 >= count) return false;
    return (bytes[bit >> 3] >> (bit & 7) & 1) != 0;
  }

  /// The bits of query i for the 32 keys from j on. Bits past the last key of a sequence are undefined.
  __device__ __forceinline__ unsigned word(int i, int j) const {
    const int column = max(j - first, 0), before = column - (j - first);
    if ((features.bit_offsets && bytes == nullptr) || before >= 32) return ~0u;
    const long long bit = static_cast<long long>(i) * row * (features.draft_bits ? 8 : 1) + column;
    const unsigned char* const from = bytes + (bit >> 3);
    int left = features.draft_bits ? row - (column >> 3) : 5;  // bytes that exist
    if constexpr (features.bit_offsets) left = min(left, count - static_cast<int>(bit >> 3));
    unsigned long long found = 0;
#pragma unroll
    for (int b = 0; b < 5; ++b) {
      if (b < left) found |= static_cast<unsigned long long>(from[b]) << 8 * b;
    }
    const unsigned seen = static_cast<unsigned>(found >> (bit & 7));
    return before == 0 ? seen : seen << before | ((1u << before) - 1);
  }

  /// The end of the keys before `key_end` that every query sees.
  __device__ __forceinline__ int seen_by_all(int key_end) const {
    return features.bit_offsets && bytes == nullptr ? key_end : min(key_end, first);
  }
};

}  // namespace flash_attention::tile
