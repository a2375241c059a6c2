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

/// Words are made with the map of tiles (word_maker.cuh), for each row tile of block_q queries of each head and sequence
/// that has a map of its own. This is the number of such a row tile.
template <int block_q>
__device__ __forceinline__ int row_tile_of_words(const abi::AttentionArgs& args, int batch_idx, int head_idx, int q_begin) {
  const int map_head = head_idx / (args.heads_q / args.map_heads), map_batch = args.map_batches == 1 ? 0 : batch_idx;
  return (map_batch * args.map_heads + map_head) * tile::ceil_div(args.seq_q, block_q) + q_begin / block_q;
}

/// Where the words of a block of keys are: those of the block_q rows one after another.
template <int block_q, int block_kv>
__device__ __forceinline__ Words<block_kv>* made_words(const abi::AttentionArgs& args, int row_tile, int block) {
  const long long place = static_cast<long long>(row_tile) * tile::ceil_div(args.seq_kv, block_kv) + block;
  return tile::workspace<Words<block_kv>>(args, abi::ForwardSm90Region::mask_words) + place * block_q;
}

}  // namespace flash_attention::mask
