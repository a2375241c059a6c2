#pragma once

// Attention backward for sm_90 (Hopper), head dimensions up to 128: dK and dV of a tile of keys, and the tile's share of
// dQ.
//
// A block holds K and V of block_kv keys of one key head, 64 for each of its two warpgroups, and loops over the
// query tiles (64 rows) of every query head of the group. Each step, in every warpgroup:
//
//     S^T = K Q^T          dP^T = V dO^T                          64 keys x 64 queries, in registers
//     P^T = 2^(S^T - lse2)                    dV += P^T dO        P and dS never leave registers as left operands
//     dS^T = P^T (dP^T - delta)               dK += dS^T Q
//     dS to shared memory, transposed
//     one of the warpgroups, in turn:         dQ += dS K          over all keys of the block; added to fp32 sums in memory
//
// dQ by one warpgroup lets the other run ahead: the warpgroups drift apart, and one's exponentials hide under another's
// products. dK and dV of a key head are complete in the block, unless the heads of a group are split between tasks: then
// they are summed in memory, too (key_sums). How dQ is summed is DqMode: in any order, in one order
// (ordered_accumulate.cuh), by a second kernel (separate_dq/kernel.cuh), or, where one tile has all keys, not at all.
//
// Words: a task is a tile of keys with its query heads; a step is one query tile of one of these heads. The owner of a step
// is the warpgroup that makes its dQ. Its sender, a warp of the producer's warpgroup, adds dQ to the sums in memory.
//
// Where to read on: prepare.cuh before, repair.cuh after this kernel; in it producer.cuh loads, consumer.cuh is the loop
// above, steps.cuh one step of it, scores.cuh the softmax, statistics.cuh what products take over of it, dq_exchange.cuh
// its last line, store_dkv.cuh stores dK and dV. A consumer is built of these in layers, each a base of the one before:
// Consumer, Steps, Epilogue, DqExchange. Other structures of the same loop: three_warpgroups/kernel.cuh (192 keys), wide/kernel.cuh (to
// 256 columns), columns/kernel.cuh (more). shape.cuh has the sizes.

#include "backward/sm90/parts/ordered_accumulate.cuh"
#include "backward/sm90/two_warpgroups/consumer.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention {
namespace backward_sm90 {

/// One lane of a warpgroup's sender, a warp that adds dQ of its steps to the sums in memory, while the warpgroup computes
/// the next.
template <BackwardConfig config>
__device__ __forceinline__ void send_all_dQ(const AttentionArgs& args, SharedStorage<config>& shared, int warpgroup) {
  constexpr int width = Shape<config>::width;
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(shared.dQ_full[warpgroup], n % 2);  // dQ has been written
    if (shared.dQ_step[warpgroup] == no_step) return;
    const Step& step = shared.step[shared.dQ_step[warpgroup] % steps_kept];
    const long long padded = step.padded;
    const unsigned key_tile = step.key_tile;
    float* const sums = workspace<float>(args, Region::dQ) + padded * width;
    if (!Shape<config>::ordered || wait_for_order(dq_order_of(args, padded), key_tile)) {
      if (Shape<config>::ordered) ptx::path<"backward/sm90 dQ added in order">();
      if constexpr (config.statistics_by_product && width > 64) {  // as far as it has been timed
        ptx::bulk_reduce_add_kept(sums, shared.dQ[warpgroup], tile_rows * width * 4);
      } else {
        ptx::bulk_reduce_add(sums, shared.dQ[warpgroup], tile_rows * width * 4);
      }
    } else {
      ptx::path<"backward/sm90 dQ stored by the first">();
      ptx::bulk_store(sums, shared.dQ[warpgroup], tile_rows * width * 4);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(shared.dQ_empty[warpgroup]);
    if constexpr (Shape<config>::ordered) signal_next(dq_order_of(args, padded), key_tile - 1);
  }
}

/// A block: its first warpgroup loads, run(warpgroup) is what each of the others does.
template <BackwardConfig config, typename Run>
__device__ __forceinline__ void run_block(const AttentionArgs& args, Run run) {
  using S = Shape<config>;
  static_assert(config.num_warps * 32 == S::threads);
  static_assert(sizeof(SharedStorage<config>) <= backward_sm90_shared_bytes(config));
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.full[s], 1);
      ptx::mbarrier_init(shared.empty[s], S::warpgroups * stage_readers<config>);
    }
    for (int w = 0; w < S::warpgroups; ++w) {
      ptx::mbarrier_init(shared.dS_empty[w], wg_threads / 32);
      ptx::mbarrier_init(shared.dQ_full[w], wg_threads / 32);
      ptx::mbarrier_init(shared.dQ_empty[w], 1);
    }
    if constexpr (S::direct_dq) {
      ptx::mbarrier_init(shared.prepared, 4 * S::warpgroups);
      for (bool& nonfinite : shared.nonfinite_rows) nonfinite = false;
    }
    ptx::mbarrier_init(shared.KV_full, 1);
    ptx::mbarrier_init(shared.KV_empty, S::warpgroups);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  if constexpr (config.statistics_by_product) {
    write_part_weights<S::type>(shared.statistics.weights, threadIdx.x);
    ptx::fence_async_shared();  // the weights before the products
  }
  __syncthreads();  // everyone sees the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    ptx::registers_decrease<S::load_registers>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) produce_work_tiles<config>(args, shared);
    if (!S::separate_dq && !S::direct_dq && threadIdx.x % 32 == 0 && warp >= 1 && warp <= S::warpgroups)
      send_all_dQ<config>(args, shared, warp - 1);
  } else {
    ptx::registers_increase<S::work_registers>();
    if constexpr (config.step_words) ptx::await_launch_before();  // the words of the masks are ready
    run(shared, warpgroup - 1);
  }
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_two_warpgroups_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 two warpgroups">();
  using namespace backward_sm90;
  static_assert(Shape<config>::warpgroups == 2);
  run_block<config>(args, [&](SharedStorage<config>& shared, int warpgroup) {
    Consumer<config>{{{{args, shared, warpgroup, static_cast<int>(threadIdx.x) % wg_threads}}}}.run();
  });
}

}  // namespace flash_attention
