#pragma once

// The order in which tasks add to the sums in memory, if every run must give the same bits.
//
// Each query tile has a counter in the workspace: the KV tile that accumulates into its dQ next. Prepare initialises it
// with the last KV tile that the queries see; then the tile before is next, and so on. Blocks take KV tiles in the same
// order, so a block only waits for blocks that were started earlier, and these are running. Under a causal mask blocks
// hardly wait: the loop of a KV tile begins at an earlier query tile than the loop of the next KV tile, so it reaches a
// given query tile later. Without a mask the blocks begin together; each waits for the one before it once, in the first
// heads.
//
// The first block that accumulates into dQ of a query tile stores it: the sums need not be zeroed before.
//
// If the heads of a group are split between tasks (gqa_split), each 16 keys (the keys of a warp) have such a counter
// for dK and dV: the split that accumulates next, beginning with the first.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

constexpr int warp_keys = 16;

/// The counter of a query tile. `padded` is the tile's first row in the padded layout, in which tiles are at least 64
/// rows apart.
__device__ __forceinline__ unsigned* dq_order_of(const AttentionArgs& args, long long padded) {
  return workspace<unsigned>(args, Region::order) + padded / tile_rows;
}
/// The counter of a warp's keys. `padded` is the first of these keys (padded_key). These counters follow those of the
/// query tiles.
__device__ __forceinline__ unsigned* dkv_order_of(const AttentionArgs& args, long long padded) {
  return dq_order_of(args, padded_rows(args) * args.heads_q) + 1 + padded / warp_keys;
}

/// The KV tile that is the first to accumulate into dQ of a query tile.
template <BackwardConfig config>
__device__ __forceinline__ unsigned first_key_tile(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                                   int q_begin) {
  const tile::Visibility<config.features> sight(args, sequence, head_idx);
  return static_cast<unsigned>(sight.template key_tiles<tile_rows, config.block_kv>(q_begin).end - 1);
}

/// A bit of a counter: no block has accumulated yet. The first one stores, so that the sums need not be zeros.
constexpr unsigned none_accumulated = 1u << 31;

/// Called by the thread that will accumulate by bulk copies. Returns when all earlier ones have accumulated; true if
/// there were any.
__device__ __forceinline__ bool wait_for_order(const unsigned* order, unsigned mine) {
  unsigned now;
  do {
    now = ptx::load_acquire(order);
  } while ((now & ~none_accumulated) != mine);
  // their sums are visible to the copies; the emulator does not miss it: it has one view of global memory
  ptx::fence_async_global();
  return now == mine;
}
/// Called by the thread that has accumulated: once its copies have arrived, the next one may go on.
__device__ __forceinline__ void signal_next(unsigned* order, unsigned next) {
  ptx::bulk_wait<0>();
  // the copies are visible to other blocks; the emulator does not miss it: it has one view of global memory
  ptx::fence_async_global();
  ptx::store_release(order, next);
}

}  // namespace flash_attention::backward_sm90
