#pragma once

// Attention forward for sm_90 (Hopper) with Q, K and V in 8 bits: TMA, wgmma of e4m3 or e5m2, warp specialisation.
//
// The structure is that of forward/sm90, and its tiles and schedule are used: one producer warp, two or three consumer
// warpgroups of 64 queries each. Differences, because operands have 8 bits:
//
//     V       is transposed by a first launch, which also puts its keys in the order of P       transpose.cuh
//     P       is rounded to e4m3; the reference of a row's softmax sets its range              softmax.cuh
//     O       is added every few blocks to sums in fp32 in shared memory                       consumer.cuh
//     scales  of Q and K are part of the scale of the scores, that of V of the last factor     epilogue.cuh
//
//     producer warp, for each tile:     load Q;  for each KV block: load K and V^T into a free stage      producer.cuh
//     consumer warpgroup, for each tile:  S = Q K^T, softmax, O += P V for each KV block; store O / sum    kv_loop.cuh

#include "forward/sm90_fp8/epilogue.cuh"
#include "forward/sm90_fp8/kv_loop.cuh"
#include "forward/sm90_fp8/producer.cuh"
#include "forward/sm90_fp8/transpose.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace forward_sm90_fp8 {

/// Processes one tile, from its first block to its store.
template <ForwardConfig config>
__device__ __forceinline__ void attend(Warpgroup<config>& wg, Work work) {
  typename Warpgroup<config>::OutputTile O;
  RowState rows;
  if (work == Work::write_zeros) {
    ptx::path<"forward/sm90_fp8 empty tile">();
#pragma unroll
    for (float& x : O) x = 0;
    sync(wg);  // all have read the tile, before one releases it
    release_queries(wg);
  } else {
    KvLoop<config>{wg, O, rows}.run();
  }
  Epilogue<config>(wg).finish(tile_of(wg), O, rows);
}

}  // namespace forward_sm90_fp8

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_fp8_kernel(const abi::AttentionArgs& args) {
  using namespace forward_sm90_fp8;
  using S = Shape<config>;
  static_assert(fits_layout<config>, "the planner reserves what SharedStorage needs");
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  if (threadIdx.x == 0) {
    forward_sm90::init_bias_barriers(shared);
    forward_sm90::init_barriers<S>(shared);
  }
  ptx::barrier_sync(barrier_all, S::threads);                                         // all threads see the barriers
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform

  if (warpgroup == 0) {
    if (threadIdx.x >= 32) tile::clear_output_tail<config>(args, threadIdx.x - 32, wg_threads - 32);  // they are idle
    ptx::registers_decrease<S::load_registers>();
    if constexpr (S::transposes_late) {
      if (threadIdx.x >= 32) transpose_others<config>(args, static_cast<int>(threadIdx.x) % 32);
    }
    if (threadIdx.x != 0) return;
    Schedule<config> schedule(args, nullptr);
    Producer<config> producer{args, shared};
    int i = 0;
    producer.load_tiles([&](Tile& tile) {
#pragma unroll 1
      while (schedule.has(i, 0)) {
        if (schedule.tile_at(i++, Attempt::fixed_max, tile)) return true;
      }
      return false;
    });
  } else {
    ptx::registers_increase<S::attend_registers>();
    Warpgroup<config> wg{args, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads};
    pingpong_begin(wg);
#pragma unroll 1
    for (;; ++wg.num_tiles) {
      const PipelineState<S::q_stages> q = q_state(wg);
      ptx::mbarrier_wait(shared.Q_full[q.stage][wg.warpgroup], q.phase);  // the next tile and its Q are ready
      const Work work = work_of(wg);
      if (work == Work::none) break;
      attend(wg, work);
    }
    if (wg.thread == 0) ptx::bulk_wait<0>();  // stores are complete before the end
    pingpong_end(wg);
  }
}

}  // namespace flash_attention
