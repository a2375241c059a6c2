#pragma once

// How the warpgroups of backward/sm90 compute dQ together. dQ of a step is dS K over all keys of the block, and each
// warpgroup has dS of 64 of them. One warpgroup, the owner of the step, computes dQ:
//
//     every warpgroup:   dS to the owner's buffer in shared memory      send_dS
//     the owner:         dQ = dS K, to its staging buffer               compute_dQ
//     its sender:        dQ to the fp32 sums in memory                  send_all_dQ: a warp of the loading warpgroup
//
// Named barriers order the buffer of dS: barrier_dS_written and barrier_dS_read (with three warpgroups, dS_empty
// instead of the latter). Mbarriers order the staging buffer: dQ_full and dQ_empty.

#include "backward/sm90/parts/early_dq.cuh"
#include "backward/sm90/parts/ordered_sums.cuh"
#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/scores.cuh"
#include "backward/sm90/parts/storage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

/// Scores with the keys along the rows: S^T, dP^T, P^T, dS^T.
template <BackwardConfig config>
using KeyScores = ScoreMath<config, Rows::keys, tile_rows>;

// -- dS to the owner of the step ------------------------------------------------------------------------------------------

/// Stores dS^T from registers (keys along the rows) to dS in shared memory (queries along the rows).
template <BackwardConfig config>
__device__ __forceinline__ void store_dS(const Warpgroup<config>& wg, const typename KeyScores<config>::Packed& dS,
                                         int owner) {
  const int lane = wg.thread % 32, warp = wg.thread / 32;
  const unsigned chunk = ptx::shared_address(wg.shared.dS[owner][wg.index]);
  const char* base = reinterpret_cast<const char*>(wg.shared.dS[owner][wg.index]);
#pragma unroll
  for (int step = 0; step < tile_rows / 16; ++step) {
    const int q = 16 * step + (lane & 7) + 8 * (lane >> 4);
    const unsigned address = swizzled(chunk, q, 2 * warp + (lane >> 3 & 1));
    ptx::stmatrix_x4_trans(const_cast<char*>(base + (address - chunk)), dS[step][0], dS[step][1], dS[step][2], dS[step][3]);
  }
}

/// The owner may read this warpgroup's dS.
template <BackwardConfig config>
__device__ __forceinline__ void signal_owner(const Warpgroup<config>& wg, int owner) {
  ptx::fence_async_shared();  // dS before the product that reads it
  if (owner != wg.index) ptx::barrier_arrive(barrier_dS_written + owner, Shape<config>::warpgroups * wg_threads);
}

/// The warpgroup that computes dQ of a step.
template <BackwardConfig config>
__device__ __forceinline__ int owner_of(const Warpgroup<config>& wg, unsigned step) {
  using S = Shape<config>;
  return static_cast<int>((S::skips_first_step ? step - wg.first_step : step) % S::warpgroups);
}
template <BackwardConfig config>
__device__ __forceinline__ bool owns(const Warpgroup<config>& wg, unsigned step) {
  return !Shape<config>::separate_dq && owner_of(wg, step) == wg.index;
}

/// Two warpgroups: stores this warpgroup's dS of a step for the owner of the step.
template <BackwardConfig config>
__device__ __forceinline__ void send_dS(const Warpgroup<config>& wg, const typename KeyScores<config>::Packed& dS,
                                        unsigned step) {
  using S = Shape<config>;
  const int owner = owner_of(wg, step);
  // The owner's product has read the buffer's earlier dS. The owner itself waited for its own product.
  if (owner != wg.index && step >= wg.first_step + S::warpgroups)
    ptx::barrier_sync_apart(barrier_dS_read + owner, S::warpgroups * wg_threads);
  store_dS(wg, dS, owner);
  signal_owner(wg, owner);
}

// -- dQ -------------------------------------------------------------------------------------------------------------------

/// dQ = dS K over all keys of the block, once dS of all warpgroups is written.
template <BackwardConfig config>
__device__ __forceinline__ void issue_dQ(const Warpgroup<config>& wg, float (&dQ)[Shape<config>::width / 2]) {
  using S = Shape<config>;
  ptx::barrier_sync(barrier_dS_written + wg.index, S::warpgroups * wg_threads);
  const int fresh = ptx::hide_from_compiler(0);
  const unsigned long long dS_desc = ptx::wgmma_descriptor(wg.shared.dS[wg.index], 0, 1024) + fresh;
  const unsigned long long K_desc = ptx::wgmma_descriptor(wg.shared.K, chunk_bytes, 1024) + fresh;
  ptx::wgmma_fence();  // dQ's registers have been used for other things
#pragma unroll
  for (int step = 0; step < 4 * S::warpgroups; ++step) {
    const int keys = step / 4, inside = step % 4;
    ptx::wgmma_ss<S::type, S::width, ptx::Major::k, ptx::Major::mn>(
        dQ, dS_desc + (keys * chunk_bytes + inside * 32) / 16,
        K_desc + (keys * S::chunks * chunk_bytes + inside * 2048) / 16, step != 0);
  }
  ptx::wgmma_commit();
}

/// The number of steps before this one, in all tasks, that the warpgroup has owned.
template <BackwardConfig config>
__device__ __forceinline__ unsigned num_owned_before(const Warpgroup<config>& wg, unsigned step) {
  using S = Shape<config>;
  if constexpr (S::skips_first_step) return wg.owned_before + (step - wg.first_step + 1 - wg.index) / 2;
  return (step + S::warpgroups - 1 - wg.index) / S::warpgroups;
}
/// Waits until dQ of the steps before this one has left the staging buffer.
template <BackwardConfig config>
__device__ __forceinline__ void await_sender(const Warpgroup<config>& wg, unsigned step) {
  ptx::mbarrier_wait(wg.shared.dQ_empty[wg.index], num_owned_before(wg, step) % 2 ^ 1);
}

/// Stores dQ to the staging buffer, which is free: each warp its 16 rows, in the order of its registers. halfway() is
/// called between the halves, so that what it issues runs under the second half.
template <BackwardConfig config, typename Halfway = Nothing>
__device__ __forceinline__ void stage_dQ(const Warpgroup<config>& wg, const float (&dQ)[Shape<config>::width / 2],
                                         Halfway halfway = {}) {
  constexpr int width = Shape<config>::width;
  const int lane = wg.thread % 32, warp = wg.thread / 32;
  float* staging = wg.shared.dQ[wg.index][warp];
#pragma unroll
  for (int group = 0; group < width / 8; ++group) {
    if (group == width / 16) halfway();
    ptx::store_shared(ptx::shared_address(staging + (group * 32 + lane) * 4),
                      ptx::Vector<float, 4>{dQ[4 * group], dQ[4 * group + 1], dQ[4 * group + 2], dQ[4 * group + 3]});
  }
}

/// Tells the sender that dQ of a step is staged.
template <BackwardConfig config>
__device__ __forceinline__ void signal_sender(const Warpgroup<config>& wg, int step) {
  const int thread = fresh_thread();
  ptx::fence_async_shared();  // the numbers are visible to the copy that reads them
  if (thread == 0) wg.shared.dQ_step[wg.index] = step;
  __syncwarp();
  if (thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.dQ_full[wg.index]);
}

/// Stops the sender after the last task. dQ of that task has left the staging buffer.
template <BackwardConfig config>
__device__ __forceinline__ void stop_sender(const Warpgroup<config>& wg) {
  if constexpr (!Shape<config>::separate_dq && !Shape<config>::direct_dq) signal_sender(wg, no_step);
}

/// direct_dq: no other block has keys of this head, so dQ goes to its rows directly.
template <BackwardConfig config>
__device__ __forceinline__ void write_dQ(const Warpgroup<config>& wg, unsigned step,
                                         const float (&dQ)[Shape<config>::width / 2]) {
  using S = Shape<config>;
  const Step& here = wg.step(step);
  const int thread = fresh_thread(), warp = thread / 32;
  const auto rows = tile::query_rows<typename S::Element, config.features>(wg.args.dQ, wg.task().sequence, here.head_idx);
  __syncwarp();  // all lanes have read what was staged before
  write_staged_rows<S::type, config.head_dim, S::width>(rows.from(here.q_begin + 16 * warp), dQ, wg.args.scale,
                                                        wg.shared.dQ[wg.index][warp], thread % 32);
}

/// Two warpgroups: computes dQ of a step that this warpgroup owns. halfway() is called while dQ is staged.
template <bool last = false, BackwardConfig config, typename Halfway = Nothing>
__device__ __forceinline__ void compute_dQ(const Warpgroup<config>& wg, unsigned step, Halfway halfway = {}) {
  using S = Shape<config>;
  float dQ[S::width / 2];
  issue_dQ(wg, dQ);
  ptx::wgmma_wait<0>();  // dQ is complete
  ptx::wgmma_pin(dQ);
  if constexpr (last) release_keys(wg);  // the next keys are loaded while dQ is sent away
  // dS may be overwritten. This is signalled only if a later step waits for it, so that no arrival is left over.
  if (step + S::warpgroups < wg.end_step) ptx::barrier_arrive(barrier_dS_read + wg.index, S::warpgroups * wg_threads);
  if constexpr (S::direct_dq) {
    write_dQ(wg, step, dQ);
    halfway();
  } else {
    await_sender(wg, step);
    stage_dQ(wg, dQ, halfway);
    signal_sender(wg, static_cast<int>(step));
  }
}

// -- the sender -----------------------------------------------------------------------------------------------------------

/// Runs in one lane of a warp of the loading warpgroup: adds dQ of a warpgroup's steps to the sums in memory while the
/// warpgroup computes the next step. With DqMode::ordered it waits until the tile before has been added; the first tile
/// is stored instead of added. If `sends_all`, it sends dQ of all warpgroups: in the order of steps they take turns.
template <bool sends_all = false, BackwardConfig config>
__device__ __forceinline__ void send_all_dQ(const AttentionArgs& args, SharedStorage<config>& shared, int warpgroup) {
  constexpr int width = Shape<config>::width;
  SentSums sent;  // early_dq
#pragma unroll 1
  for (int n = 0;; ++n) {
    if constexpr (sends_all) warpgroup = n % Shape<config>::warpgroups;
    const int sent_before = sends_all ? n / Shape<config>::warpgroups : n;
    ptx::mbarrier_wait(shared.dQ_full[warpgroup], sent_before % 2);  // dQ has been written
    if (shared.dQ_step[warpgroup] == no_step) break;
    const Step& step = shared.step[shared.dQ_step[warpgroup] % steps_kept];
    const long long padded = step.padded;
    const unsigned key_tile = step.signal_idx;
    if constexpr (config.early_dq) sent.count_one(args, step.signal_idx);
    float* const sums = workspace<float>(args, Region::dQ) + padded * width;
    if (!Shape<config>::ordered || wait_for_order(dq_order_of(args, padded), key_tile)) {
      if (Shape<config>::ordered) ptx::path<"backward/sm90 dQ added in order">();
      if constexpr (config.statistics_by_product && width > 64) {  // only these have been timed
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
  if constexpr (config.early_dq) sent.tell(args);
}

/// The loading warpgroup: warp 0 loads, warp w + 1 is the sender of warpgroup w. With early_dq the last warps convert;
/// with three warpgroups one sender is left for all.
template <BackwardConfig config>
__device__ __forceinline__ void load_and_send(const AttentionArgs& args, SharedStorage<config>& shared) {
  using S = Shape<config>;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) produce_work_tiles<config>(args, shared);
  constexpr bool sends_all = config.early_dq && S::warpgroups > 2;
  constexpr int senders = sends_all ? 1 : S::warpgroups;
  if (!S::separate_dq && !S::direct_dq && threadIdx.x % 32 == 0 && warp >= 1 && warp <= senders)
    send_all_dQ<sends_all>(args, shared, warp - 1);
  if constexpr (config.early_dq) {
    if (warp > senders) convert_early_heads<config>(args, warp - senders - 1, wg_threads / 32 - senders - 1);
  }
}

}  // namespace flash_attention::backward_sm90
