#pragma once

// For two and three warpgroups of backward/sm90: their shared memory, their barriers, and the state of a warpgroup that
// computes.

#include "backward/sm90/parts/producer.cuh"
#include "backward/sm90/parts/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"

namespace flash_attention::backward_sm90 {

/// The mbarriers of a block; named barriers are below:
///
///     full, empty [stage]      Q, dO and statistics of a step have landed; every warpgroup has read them
///     KV_full, KV_empty        the same for K and V of a task
///     dS_empty [warpgroup]     three warpgroups: its product has read dS of all warpgroups
///     dQ_full, dQ_empty        between a warpgroup and its sender: dQ is staged; dQ has left the staging buffer
///     prepared                 direct_dq: the statistics of a task's queries are in memory
template <BackwardConfig config>
struct alignas(1024) SharedStorage : BiasTiles<config> {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  // Tiles are chunks of 64 columns; a chunk is rows of 128 bytes whose 16-byte pieces are swizzled by the row.
  Chunk K[S::warpgroups][S::chunks];
  Chunk V[S::warpgroups][S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[S::stages][S::chunks_v];
  Chunk dS[S::separate_dq ? 1 : S::warpgroups][S::separate_dq ? 1 : S::warpgroups];     // [step's owner][keys of warpgroup]
  float dQ[S::separate_dq ? 1 : S::warpgroups][4][S::separate_dq ? 4 : 16 * S::width];  // in flight to memory
  StatisticsTiles<S::stages, config.statistics_by_product> statistics;
  ptx::Mbarrier prepared;
  ptx::Mbarrier full[S::stages], empty[S::stages], KV_full, KV_empty;
  ptx::Mbarrier dS_empty[S::warpgroups];
  ptx::Mbarrier dQ_full[S::warpgroups], dQ_empty[S::warpgroups];
  int dQ_step[S::warpgroups];  // the step whose dQ is in the staging buffer; no_step: there will be no more
  unsigned num_blocks;         // of the grid; kept here because the producer warp has no register for it
  Step step[steps_kept];
  bool nonfinite_rows[4 * S::warpgroups];       // direct_dq: some query that the warp prepared may not be finite
  unsigned nonfinite_lanes[S::warpgroups][4];   // keys with a NaN or Inf, of each warp: two bits for each
  WorkTile<config> work_tile[work_tiles_kept];  // kept here because registers are short

  __device__ __forceinline__ void init() {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(full[s], 1);
      ptx::mbarrier_init(empty[s], S::warpgroups * stage_readers<config>);
    }
    for (int w = 0; w < S::warpgroups; ++w) {
      ptx::mbarrier_init(dS_empty[w], wg_threads / 32);
      ptx::mbarrier_init(dQ_full[w], wg_threads / 32);
      ptx::mbarrier_init(dQ_empty[w], 1);
    }
    if constexpr (S::direct_dq) {
      ptx::mbarrier_init(prepared, 4 * S::warpgroups);
      for (bool& nonfinite : nonfinite_rows) nonfinite = false;
    }
    ptx::mbarrier_init(KV_full, 1);
    ptx::mbarrier_init(KV_empty, S::warpgroups);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
};

/// Named barriers. barrier_dS_written and barrier_dS_read are the first of one for each warpgroup.
enum Barrier : int { barrier_keys = 1, barrier_dS_written = 2, barrier_dS_read = 5 };

constexpr int no_step = -1;

/// Returns the shared memory of the block, with its barriers ready.
template <BackwardConfig config>
__device__ __forceinline__ SharedStorage<config>& begin_block() {
  static_assert(config.num_warps * 32 == Shape<config>::threads);
  static_assert(sizeof(SharedStorage<config>) <= backward_sm90_shared_bytes(config));
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  if (threadIdx.x == 0) shared.init();
  if constexpr (config.statistics_by_product) {
    write_part_weights<Shape<config>::type>(shared.statistics.weights, threadIdx.x);
    ptx::fence_async_shared();  // the weights are visible to the products
  }
  __syncthreads();  // everyone sees the barriers
  return shared;
}

/// The state of a warpgroup that computes, and its task.
template <BackwardConfig config>
struct Warpgroup {
  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int index;   // its keys begin at row 64 * index of the block's tile
  const int thread;  // in the warpgroup
  int task_number = 0;

  // Facts of the task. They come through a shuffle, so the compiler knows that all lanes of a warp have the same
  // values, and keeps them in uniform registers. Loading them again would be slow, since products keep shared memory
  // busy.
  unsigned first_step = 0, end_step = 0;
  unsigned owned_before = 0;  // skips_first_step: steps that the warpgroup has owned in the tasks before
  bool edge = false;          // the warpgroup does not see all of any step

  /// The same, with the thread index read again.
  __device__ __forceinline__ Warpgroup fresh() const {
    return {args, shared, index, fresh_thread(), task_number, first_step, end_step, owned_before, edge};
  }

  __device__ __forceinline__ const WorkTile<config>& work_tile() const {
    return shared.work_tile[task_number % work_tiles_kept];
  }
  __device__ __forceinline__ const Task<config>& task() const { return work_tile().task; }
  __device__ __forceinline__ const Step& step(unsigned n) const { return shared.step[n % steps_kept]; }
};

/// Used if no product brings the threads of the warpgroup together. After it, no thread still waits for a phase that
/// others have already seen.
template <BackwardConfig config>
__device__ __forceinline__ void await_all_threads(const Warpgroup<config>& wg) {
  ptx::barrier_sync(barrier_warpgroup + wg.index, wg_threads);
}
/// Signals that this warpgroup is done with K and V of the task.
template <BackwardConfig config>
__device__ __forceinline__ void release_keys(const Warpgroup<config>& wg) {
  if (leads_warpgroup()) ptx::mbarrier_arrive(wg.shared.KV_empty);
}

}  // namespace flash_attention::backward_sm90
