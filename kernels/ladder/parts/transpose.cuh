#pragma once

// The first launch of 17_fp8: V^T, with keys in the order that a product of 8 bits needs. It reads and writes V
// once, which is little compared with the attention; forward/sm90_fp8 does the same with wider reads.

#include "abi/forward_sm90_fp8.h"
#include "ptx/memory.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// V^T in the workspace, [batch, heads_kv, head_dim, places], with the keys of each 16 in the order of P: places 4u to
/// 4u + 3 hold keys 2u, 2u + 1, 2u + 8 and 2u + 9. Places past the last key are 0. A block takes block_kv places of a head,
/// a thread 16 places of two columns at a time: a warp reads 64 neighbouring columns of a key.
template <ForwardConfig config>
__device__ __forceinline__ void transpose(const AttentionArgs& args) {
  const long long places = transposed_places(false, args.batch, args.seq_kv, 0, config.block_kv);
  const auto block = tile::key_block(blockIdx.x, static_cast<int>(places) / config.block_kv, args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const auto V = tile::key_rows<const unsigned char, config.features>(args.V, sequence, block.head_idx);
  const long long head = static_cast<long long>(block.batch_idx) * args.heads_kv + block.head_idx;
  for (int i = threadIdx.x; i < config.head_dim_v / 2 * config.block_kv / 16; i += config.num_warps * 32) {
    const int column = i % (config.head_dim_v / 2) * 2;
    const int first = block.tile_idx * config.block_kv + i / (config.head_dim_v / 2) * 16;
    ptx::Vector<unsigned, 4> words[2]{};  // of the two columns
#pragma unroll
    for (int p = 0; p < 16; ++p) {
      const int key = first + p % 4 / 2 * 8 + p / 4 * 2 + p % 2;
      const auto* from = reinterpret_cast<const unsigned short*>(V.row(key) + column);
      const unsigned pair = key < args.seq_kv ? ptx::load_readonly(from) : 0;
      words[0][p / 4] |= (pair & 0xffu) << p % 4 * 8;
      words[1][p / 4] |= (pair >> 8) << p % 4 * 8;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      auto* to = tile::workspace<unsigned char>(args, ForwardSm90Fp8Region::transposed_V) +
                 (head * config.head_dim_v + column + c) * places + first;
      ptx::store_global(reinterpret_cast<ptx::Vector<unsigned, 4>*>(to), words[c]);
    }
  }
}

}  // namespace flash_attention
