#pragma once

// Conversion of dQ while the main kernel runs (BackwardConfig::early_dq). Tasks take one head after another, so the sums
// of most heads are complete long before the kernel ends. Then they are still in L2, and memory has little to do. The last
// heads are left to a launch of their own (AttentionArgs::early_heads).
//
// Each head has a counter in the workspace: the additions that its sums still need. Prepare initialises it. A sender
// subtracts what it has added when it comes to another head, so that it hardly waits for its copies. In each block a warp
// of the loading warpgroup (two, with three warpgroups that compute) takes the heads in order, waits until the counter is
// 0, and converts the block's share of the tiles of queries.

#include "backward/sm90/parts/products.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/launch.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::backward_sm90 {

/// The additions that the sums of a head still need.
__device__ __forceinline__ unsigned* missing_sums_of(const AttentionArgs& args, int head) {
  return workspace<unsigned>(args, Region::tasks) + num_counters + head;
}

/// For a warp of prepare: every pair of a tile of keys and a tile of queries that it sees is an addition.
template <BackwardConfig config>
__device__ __forceinline__ void count_missing_sums(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                                   int lane) {
  const tile::Visibility<config.features> sight(args, sequence, head_idx);
  unsigned count = 0;
#pragma unroll 1
  for (int kv_begin = lane * config.block_kv; kv_begin < args.seq_kv; kv_begin += 32 * config.block_kv) {
    const tile::TileRange tiles = sight.template query_tiles<tile_rows, config.block_kv>(kv_begin);
    count += static_cast<unsigned>(tile::max(tiles.end - tiles.begin, 0));
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) count += ptx::shuffle_xor(count, distance);
  if (lane == 0) *missing_sums_of(args, sequence.batch_idx * args.heads_q + head_idx) = count;
}

/// What a sender has added to the sums of a head and not told yet.
struct SentSums {
  int head = 0;
  unsigned count = 0;

  __device__ __forceinline__ void tell(const AttentionArgs& args) const {
    if (count == 0) return;
    ptx::bulk_wait<0>();
    // the copies are visible to other blocks; the emulator does not miss it: it has one view of global memory
    ptx::fence_async_global();
    ptx::atomic_add_acq_rel(missing_sums_of(args, head), 0u - count);
  }
  /// Before a sum of this head is added to.
  __device__ __forceinline__ void count_one(const AttentionArgs& args, int next_head) {
    if (next_head != head) tell(args), head = next_head, count = 0;
    ++count;
  }
};

/// For a warp: dQ of 16 rows of a head, from their sums. A lane takes what a lane's registers held: two columns of two
/// rows, 8 columns after 8 columns. A warp of the loading warpgroup has few registers: with wider stores it would spill,
/// and so it would if it kept addresses from one strip to the next.
template <BackwardConfig config>
__device__ __forceinline__ void convert_strip(const AttentionArgs& args, int head, int row) {
  using S = Shape<config>;
  const int lane = ptx::hide_from_compiler(static_cast<int>(threadIdx.x)) % 32;
  head = ptx::hide_from_compiler(head);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, head / args.heads_q);
  const int head_idx = head % args.heads_q;
  const auto rows = tile::query_rows<typename S::Element, config.features>(args, args.dQ, sequence, head_idx).from(row);
  const long long padded = head_idx * padded_rows(args) + padded_start(args, sequence) + row;
  const auto* from =
      reinterpret_cast<const ptx::Vector<float, 4>*>(workspace<float>(args, Region::dQ) + padded * S::width) + lane;
  const bool has_second = lane / 4 + 8 < rows.count;
  if (lane / 4 >= rows.count) return;
  typename S::Element* to = rows.row(lane / 4) + 2 * (lane % 4);
  const long long eight_rows = 8 * rows.stride;
  constexpr int at_once = S::load_registers >= 32 ? 4 : 2, groups = config.head_dim / 8;
#pragma unroll 1
  for (int group = 0; group < groups; group += at_once) {
    ptx::Vector<float, 4> four[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      if (groups % at_once == 0 || group + n < groups) four[n] = ptx::load_global(from + 32 * n);
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      if (groups % at_once != 0 && group + n >= groups) break;
      const auto pair = [&](int i) { return ptx::pack<S::type>(four[n][i] * args.scale, four[n][i + 1] * args.scale); };
      ptx::store_global(reinterpret_cast<unsigned*>(to + 8 * n), pair(0));
      if (has_second) ptx::store_global(reinterpret_cast<unsigned*>(to + eight_rows + 8 * n), pair(2));
    }
    from += 32 * at_once, to += 8 * at_once;
  }
}

/// For each of `converters` warps of every block: takes tiles of the early heads in turn, and waits until the sums of the
/// head are complete.
template <BackwardConfig config>
__device__ __forceinline__ void convert_early_heads(const AttentionArgs& args, int converter, int converters) {
  ptx::griddepcontrol_wait();  // prepare has initialised the counters
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x) * converters + converter;;
       task += static_cast<int>(gridDim.x) * converters) {
    const int tiles = tile::ceil_div(args.seq_q, tile_rows), head = task / tiles;
    if (head >= args.early_heads) return;
    while (ptx::load_acquire(missing_sums_of(args, head)) != 0) {
    }
#pragma unroll 1
    for (int row = 0; row < tile_rows; row += 16) convert_strip<config>(args, head, task % tiles * tile_rows + row);
  }
}

}  // namespace flash_attention::backward_sm90
