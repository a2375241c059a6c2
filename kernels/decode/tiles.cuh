#pragma once

#include "abi/args.h"
#include "abi/decode.h"
#include "decode/code_tile.cuh"
#include "ptx/barrier.cuh"
#include "tile/swizzle.cuh"

// Shared by all parts of the decode kernels: tiles of K and V in shared memory, and the barrier of the warps that compute.

namespace flash_attention::decode {

using namespace abi;

template <ForwardConfig config>
struct DecodeTiles {
  using K = tile::SwizzledTile<config.block_kv, DecodeLayout::stored_key_columns(config)>;
  using V = tile::SwizzledTile<config.block_kv, DecodeLayout::stored_value_columns(config)>;
  using Q = tile::SwizzledTile<16 * DecodeLayout(config).row_warps, DecodeLayout::columns_of(config, config.head_dim)>;
};

template <ForwardConfig config>
requires(has_groups(key_type(config.features))) struct DecodeTiles<config> {
  using K = CodeTile<config.block_kv, config.head_dim / 4>;
  using V = CodeTile<config.block_kv, config.head_dim_v / 4>;
  using Q = CodeQueries<config.block_q <= 8 ? 8 : 16, config.head_dim / 32>;
};

/// K and V of a tile. Latent keys begin with their values.
template <ForwardConfig config>
struct DecodeStage {
  typename DecodeTiles<config>::K K;
  typename DecodeTiles<config>::V V;
  static constexpr unsigned value_offset = sizeof(K);
};
template <ForwardConfig config>
requires(config.features.latent) struct DecodeStage<config> {
  typename DecodeTiles<config>::K K;
  static constexpr unsigned value_offset = 0;
};

/// Named barriers of the warps that have the same keys (decode/sm90): 5 and 6. Barriers 1 to 4 have other uses.
constexpr int barrier_rows = 5;

/// A barrier of the warps that compute: all warps of the block, or all but the producers.
template <ForwardConfig config>
__device__ __forceinline__ void sync_consumers() {
  if constexpr (config.producer_warp) {
    ptx::barrier_sync(1, 32 * config.num_warps);
  } else {
    __syncthreads();
  }
}

}  // namespace flash_attention::decode
