#pragma once

// The order in which tasks add to the sums in memory, where every run must give the same bits.
//
// Each query tile has a number in the workspace: the tile of keys whose turn it is to add to its dQ. The last tile that the
// queries see comes first (prepare writes it), then the one before. Blocks take the tiles of keys in that order too, so
// whoever comes first has been started first, and nobody waits for a block that does not run. Under a causal mask a tile of
// keys comes to a query tile later than the one behind it, by the query tiles that lie between their first steps: hardly
// anyone waits. Without a mask the blocks begin together, and fall behind each other once, in the first heads.
//
// Whoever is the first to add to dQ of a query tile stores it: the sums need not be zeroed before.
//
// Where the heads of a group are divided between tasks, each 16 keys (those of a warp) have such a number for dK and dV:
// the part of the group whose turn it is, from the first one on.

#include "backward/sm90/shape.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

constexpr int warp_keys = 16;

/// The turn of a query tile; `padded` is its first row in the padded layout, where tiles are at least 64 rows apart.
__device__ __forceinline__ unsigned* dq_order_of(const AttentionArgs& args, long long padded) {
  return workspace<unsigned>(args, workspace_order) + padded / tile_rows;
}
/// The turn of a warp's keys; `padded` is the first of them (padded_key). They follow the turns of the query tiles.
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

/// A bit of a turn: nobody has added yet. The first one stores, so that the sums need not be zeros.
constexpr unsigned none_accumulated = 1u << 31;

/// The thread that is going to add, by copies: all who come before it have added. Returns whether there are any.
__device__ __forceinline__ bool wait_for_order(const unsigned* order, unsigned mine) {
  unsigned now;
  do {
    now = ptx::load_acquire(order);
  } while ((now & ~none_accumulated) != mine);
  ptx::fence_async_global();  // what they did before the copies
  return now == mine;
}
/// The thread that has added: when its copies have arrived, it is the next one's turn.
__device__ __forceinline__ void signal_next(unsigned* order, unsigned next) {
  ptx::bulk_wait<0>();
  ptx::fence_async_global();  // the copies before what others do
  ptx::store_release(order, next);
}

}  // namespace flash_attention::backward_sm90
