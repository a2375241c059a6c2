#pragma once

#include "abi/workspace.h"
#include "ptx/memory.cuh"
#include "tile/math.cuh"
#include "tile/workspace.cuh"

// Which pairs of a block of keys are visible, a bit a pair, as far as the masks say.

namespace flash_attention::mask {

/// Of a row and a block of keys: bit l of word k is of key l * (block_kv / 32) + k.
template <int block_kv>
using Words = ptx::Vector<unsigned, block_kv / 32 < 2 ? 1 : block_kv / 32>;

/// Where the words of a block are that were made with the map of tiles (word_maker.cuh), for all heads and sequences: those
/// of its block_q rows one after another.
template <int block_q, int block_kv>
__device__ __forceinline__ Words<block_kv>* made_words(const abi::AttentionArgs& args, int q_begin, int block) {
  const long long place = static_cast<long long>(q_begin) / block_q * tile::ceil_div(args.seq_kv, block_kv) + block;
  return tile::workspace<Words<block_kv>>(args, abi::ForwardSm90Region::mask_words) + place * block_q;
}

}  // namespace flash_attention::mask
