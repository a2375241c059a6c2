#pragma once

#include "tile/key_list.cuh"

// Converts lists of blocks of keys to a block mask, [batch, 1 or heads_q, rows of lists, blocks of keys], for kernels
// that accept one: a byte for each block, 1 if the list names it. A thread block takes a list.
//
//   for each head that shares the list:
//     bytes of the row = 0
//     for each entry:  byte of its block = 1

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
__device__ __forceinline__ void mask_listed_blocks(const AttentionArgs& args) {
  const int rows = tile::ceil_div(args.seq_q, args.list_block_q), units = static_cast<int>(args.block_mask.q_stride);
  const int head = blockIdx.x % args.list_heads, rest = blockIdx.x / args.list_heads;
  const int row = rest % rows, batch_idx = rest / rows;
  const tile::Sequence sequence{batch_idx, args.seq_q, args.seq_kv, 0, 0, 0, 0, 0, 0};
  const tile::KeyListView list(args, sequence, false, row, head);
  const int copies = args.block_mask.head_stride != 0 ? args.heads_q / args.list_heads : 1;  // heads that share the list
  auto* const mask = static_cast<unsigned char*>(const_cast<void*>(args.block_mask.data)) +
                     batch_idx * args.block_mask.batch_stride + row * args.block_mask.q_stride;
  for (int copy = 0; copy < copies; ++copy) {
    unsigned char* const to = mask + (head * static_cast<long long>(copies) + copy) * args.block_mask.head_stride;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) to[unit] = 0;
    __syncthreads();  // the row is clear
    for (int e = threadIdx.x; e < list.count; e += blockDim.x) {
      const int unit = list.template entry<true>(e, units);
      if (unit >= 0) to[unit] = 1;
    }
  }
}

}  // namespace flash_attention
