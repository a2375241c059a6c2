#pragma once

#include "abi/decode.h"
#include "decode/schedule.cuh"
#include "ptx/atomic.cuh"

// Where the blocks that share an item leave their parts of its result, and how the last of them knows that it is the last.
//
// workspace_offsets[0]: a word for each block, which counts who has come to the item that is cut at the block's end.
// workspace_offsets[1]: two parts for each block: of the item that began before it, and of the one that it began.
//
// The words need no initialisation, since a memset would cost as much as a short call. A word is 48 bits of tag, made from
// its own address, and 16 bits of count. Whatever a workspace holds is no tag but by a chance of 2^-48, and then the first
// block to look puts the tag there with a count of 0; the last to arrive puts the count back to 0 for the next call.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Parts {
  static constexpr long long part_floats = decode_part_bytes(config) / 4;
  using Word = unsigned long long;

  Word* words;
  float* parts;

  __device__ __forceinline__ explicit Parts(const AttentionArgs& args)
      : words(reinterpret_cast<Word*>(static_cast<char*>(args.workspace) + args.workspace_offsets[0])),
        parts(reinterpret_cast<float*>(static_cast<char*>(args.workspace) + args.workspace_offsets[1])) {}

  __device__ __forceinline__ Word tag_of(int block) const {
    Word tag = reinterpret_cast<Word>(words + block) * 0x9E3779B97F4A7C15ull;
    tag = (tag ^ tag >> 29) * 0xBF58476D1CE4E5B9ull;
    return tag & ~Word{0xffff};
  }

  /// Before arrive(), by everyone who will: the word counts from 0. `found` is what look() has read.
  __device__ __forceinline__ void prepare(int block, Word found) const {
    // Where this fails somebody else was faster.
    if ((found & ~Word{0xffff}) != tag_of(block)) ptx::compare_exchange(words + block, found, tag_of(block));
  }
  __device__ __forceinline__ Word look(int block) const { return ptx::load_relaxed(words + block); }

  /// Whether all of `count` blocks have come; what each wrote before is then visible here.
  __device__ __forceinline__ bool arrive(int block, int count) const {
    const Word before = ptx::atomic_add_acq_rel(words + block, Word{1});
    if (static_cast<int>(before & 0xffff) + 1 < count) return false;
    ptx::store_global(words + block, tag_of(block));
    return true;
  }

  /// Part x of an item that block `first` begins.
  __device__ __forceinline__ float* part(int first, int x) const {
    return parts + (2ll * (first + x) + (x == 0 ? 1 : 0)) * part_floats;
  }
  __device__ __forceinline__ static long long value_offset(int row) {
    return static_cast<long long>(row) * config.head_dim_v;
  }
  __device__ __forceinline__ static long long statistics_offset(int row) {
    return static_cast<long long>(config.block_q) * config.head_dim_v + 2 * row;
  }
};

}  // namespace flash_attention::decode
