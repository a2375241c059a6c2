#pragma once

#include "abi/args.h"
#include "abi/decode.h"
#include "ptx/barrier.cuh"
#include "tile/swizzle.cuh"

// What the parts of the decode kernels share: the tiles of K and V in shared memory, and the barrier of those who compute.

namespace flash_attention::decode {

using namespace abi;

template <ForwardConfig config>
struct DecodeTiles {
  using K = tile::SwizzledTile<config.block_kv, DecodeLayout::stored_columns(config, config.head_dim)>;
  using V = tile::SwizzledTile<config.block_kv, DecodeLayout::stored_columns(config, config.head_dim_v)>;
};

/// Named barriers of the warps that have the same keys (decode/sm90): this one and the next. 1 to 4 are others.
constexpr int barrier_rows = 5;

/// A barrier of the warps that compute: all of the block, or all but the producer.
template <ForwardConfig config>
__device__ __forceinline__ void sync_consumers() {
  if constexpr (config.producer_warp) {
    ptx::barrier_sync(1, 32 * config.num_warps);
  } else {
    __syncthreads();
  }
}

}  // namespace flash_attention::decode
