#pragma once

// The order in which tasks add to the sums in memory, if every run must give the same bits.
//
// Each query tile has a counter in the workspace: it names the KV tile that accumulates into dQ next. The last KV tile that
// the queries see comes first (prepare writes it), then the one before. Blocks take KV tiles in the same order, so a block
// only waits for blocks that were started before it, and these run. Under a causal mask a KV tile reaches a query tile
// later than the tile after it, by the query tiles between their first steps: blocks hardly wait. Without a mask the blocks
// begin together. Each then waits for the one before it once, in the first heads.
//
// The first block that accumulates into dQ of a query tile stores it: the sums need not be zeroed before.
//
// If the heads of a group are split between tasks (gqa_split), each 16 keys (those of a warp) have such a counter for dK
// and dV: it names the split that accumulates next, from the first one on.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

constexpr int warp_keys = 16;

/// The counter of a query tile; `padded` is its first row in the padded layout, where tiles are at least 64 rows apart.
__device__ __forceinline__ unsigned* dq_order_of(const AttentionArgs& args, long long padded) {
  return workspace<unsigned>(args, Region::order) + padded / tile_rows;
}
/// The counter of a warp's keys; `padded` is the first of them (padded_key). It follows the counters of the query tiles.
__device__ __forceinline__ unsigned* dkv_order_of(const AttentionArgs& args, long long padded) {
  return dq_order_of(args, padded_rows(args) * args.heads_q) + 1 + padded / warp_keys;
}

/// The tile of keys that adds to dQ of a query tile before all others.
template <BackwardConfig config>
__device__ __forceinline__ unsigned first_key_tile(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                                   int q_begin) {
  const tile::Score<config.features> score(args, sequence, head_idx);
  return static_cast<unsigned>(score.template key_tiles<tile_rows, config.block_kv>(q_begin).end - 1);
}

/// A bit of a counter: no block has accumulated yet. The first one stores, so that the sums need not be zeros.
constexpr unsigned none_accumulated = 1u << 31;

/// The thread that will accumulate, by copies: returns when all that come before it have; true if there are any.
__device__ __forceinline__ bool wait_for_order(const unsigned* order, unsigned mine) {
  unsigned now;
  do {
    now = ptx::load_acquire(order);
  } while ((now & ~none_accumulated) != mine);
  ptx::fence_async_global();  // what they did before the copies; not found by the emulator: one view of global memory
  return now == mine;
}
/// The thread that has accumulated: when its copies have arrived, the next one may go on.
__device__ __forceinline__ void signal_next(unsigned* order, unsigned next) {
  ptx::bulk_wait<0>();
  ptx::fence_async_global();  // the copies before what others do; not found by the emulator: one view of global memory
  ptx::store_release(order, next);
}

}  // namespace flash_attention::backward_sm90
