#pragma once

// The tiles of a block of a persistent kernel. Producer and consumers go through the same list, so they need not exchange
// it. Each counts what it has done, and computes the next stage and phase from that.

#include "abi/args.h"
#include "abi/config.h"
#include "tile/math.cuh"

namespace flash_attention {

using namespace abi;

/// The work that a warp has done. Stages and phases follow from it.
struct Progress {
  int tiles = 0;
  int blocks = 0;
};

/// The tiles of this block, in order: work(index, head, batch, q_begin). Under a causal mask row tile `last - x` is
/// followed by row tile x, so that every pair is the same work.
template <ForwardConfig config, typename Work>
__device__ __forceinline__ void for_each_tile(const AttentionArgs& args, Work work) {
  constexpr bool pairs = config.features.window_right;
  const int row_tiles = tile::ceil_div(args.seq_q, config.block_q);
  const int units = pairs ? tile::ceil_div(row_tiles, 2) : row_tiles;  // of a head
  int index = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units * args.heads_q * args.batch; unit += gridDim.x) {
    const int head = unit / units, position = unit % units;
#pragma unroll 1
    for (int second = 0; second < (pairs ? 2 : 1); ++second, ++index) {
      const int row_tile = second || !pairs ? position : row_tiles - 1 - position;
      if (second && row_tile == row_tiles - 1 - position) continue;  // the tile in the middle has no partner
      work(index, head % args.heads_q, head / args.heads_q, row_tile * config.block_q);
    }
  }
}

}  // namespace flash_attention
