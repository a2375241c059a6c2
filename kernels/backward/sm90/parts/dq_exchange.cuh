#pragma once

// How the warpgroups of backward/sm90 make dQ together. Each lays its dS of a step down in shared memory; the step's owner
// multiplies it by all keys of the block:
//
//     every warpgroup:   dS to the owner's buffer          send_dS
//     the owner:         dQ = dS K, to the staging buffer  make_dQ
//     its sender:        dQ += to the sums in memory       kernel.cuh

#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/scores.cuh"
#include "backward/sm90/parts/storage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/registers.cuh"

namespace flash_attention::backward_sm90 {

/// One consumer warpgroup: 64 keys, its place in the work tile, and its part in dQ.
template <BackwardConfig config>
struct DqExchange {
  using S = Shape<config>;
  using Math = ScoreMath<config, Rows::keys, tile_rows>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;  // in the warpgroup
  int work_tile_idx = 0;

  // Of the task: the same in all lanes of a warp, which the compiler knows (they came through a shuffle), so that it keeps
  // them in uniform registers. A load from shared memory takes long under the products' reads.
  unsigned first_step = 0, end_step = 0;
  unsigned owned = 0;  // steps the warpgroup has owned in the tasks before
  bool edge = false;   // the warpgroup does not see everything of any step

  __device__ __forceinline__ const WorkTile<config>& work_tile() const {
    return shared.work_tile[work_tile_idx % work_tiles_kept];
  }
  __device__ __forceinline__ const Task<config>& task() const { return work_tile().task; }

  /// The thread, read again: nothing computed from it stays in registers.
  __device__ __forceinline__ static int fresh_thread() {
    return ptx::registers_fresh(static_cast<int>(threadIdx.x)) % wg_threads;
  }

  /// The first thread of the warpgroup.
  __device__ __forceinline__ bool leads() const { return threadIdx.x % wg_threads == 0; }

  __device__ __forceinline__ void begin_task() {
    const int seen = task().sequence.visible_kv - task().kv_begin - warpgroup * tile_rows;
    const bool nonfinite = !S::separate_dq && shared.nonfinite_lanes[warpgroup][thread / 32] != 0;
    edge = ptx::shuffle(seen < tile_rows || nonfinite ? 1 : 0, 0) != 0;
    first_step = ptx::shuffle(work_tile().first_step, 0);
    end_step = ptx::shuffle(work_tile().end_step, 0);
    if constexpr (S::skips_first_step) owned = ptx::shuffle(work_tile().owned[warpgroup], 0);
  }

  /// Loads the biases of a step, and prefetches those of a later one to L2. Boxes have landed with their stage.
  __device__ __forceinline__ void load_bias(unsigned step, typename Math::Bias& bias) const {
    if constexpr (config.bias_boxes) {
      if (has_bias_boxes(args))
        return Math::read_bias(bias, shared.biases[PipelineState<S::stages>(step).stage][warpgroup], fresh_thread());
    }
    if constexpr (Math::Bias::present) {
      const Step& here = shared.step[step % steps_kept];
      const tile::Score<config.features> score(args, fresh_sequence(task().sequence), here.head_idx);
      const int kv_begin = task().kv_begin + warpgroup * tile_rows;
      bias = Math::load_bias(score, here.q_begin, kv_begin, fresh_thread());
      Math::Bias::template prefetch<tile_rows, tile_rows>(score, here.q_begin + 3 * tile_rows, kv_begin, fresh_thread());
      if constexpr (config.bias_boxes) bias.transpose();
    }
  }

  // -- keys that must not be multiplied ---------------------------------------------------------------------------------

  /// Zeroes the rows of K that no query may see, and rows with a NaN or Inf: dQ = dS K would multiply them by the zeros of
  /// hidden scores. What such a key does to the queries that see it, ScoreMath does (nonfinite_row).
  __device__ __forceinline__ void zero_nonfinite_keys() {
    const int thread = fresh_thread();
    const int row = thread / 2;  // two threads share a row
    const bool hidden = task().kv_begin + warpgroup * tile_rows + row >= task().sequence.visible_kv;
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = thread % 2; S::checks_keys && piece < 8; piece += 2) {
        const auto words =
            ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(shared.K[warpgroup][c]), row, piece));
#pragma unroll
        for (int x = 0; x < 4; ++x) bits |= not_finite<type>(words[x]);
      }
    }
    const unsigned nonfinite_lanes = ptx::ballot(bits != 0);
    if (S::checks_keys && (hidden || (nonfinite_lanes >> (thread % 32 & ~1) & 3) != 0)) {
#pragma unroll 1
      for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
        for (int piece = thread % 2; piece < 8; piece += 2) {
          ptx::store_shared(swizzled(ptx::shared_address(shared.K[warpgroup][c]), row, piece), ptx::Vector<unsigned, 4>{});
        }
      }
    }
    if constexpr (S::checks_keys)
      ptx::fence_async_shared();  // the zeros before the products; not found by the emulator: signal_owner has one, too
    if (thread % 32 == 0) shared.nonfinite_lanes[warpgroup][thread / 32] = nonfinite_lanes;
    // The owner of a step multiplies the keys of all warpgroups.
    ptx::barrier_sync(barrier_keys, S::warpgroups * wg_threads);
  }

  // -- products ---------------------------------------------------------------------------------------------------------

  /// dQ = dS K over all keys of the block.
  __device__ __forceinline__ void issue_dQ(float (&dQ)[S::width / 2], int fresh) const {
    const unsigned long long dS_desc = ptx::wgmma_descriptor(shared.dS[warpgroup], 0, 1024) + fresh;
    const unsigned long long K_desc = ptx::wgmma_descriptor(shared.K, chunk_bytes, 1024) + fresh;
    ptx::wgmma_fence();  // dQ's registers have been used for other things
#pragma unroll
    for (int step = 0; step < 4 * S::warpgroups; ++step) {
      const int keys = step / 4, inside = step % 4;
      ptx::wgmma_ss<type, S::width, ptx::Major::k, ptx::Major::mn>(
          dQ, dS_desc + (keys * chunk_bytes + inside * 32) / 16,
          K_desc + (keys * S::chunks * chunk_bytes + inside * 2048) / 16, step != 0);
    }
    ptx::wgmma_commit();
  }

  // -- dS and dQ through shared memory ----------------------------------------------------------------------------------

  /// dS^T in registers (keys along the rows) to dS in shared memory (queries along the rows).
  __device__ __forceinline__ void store_dS(const typename Math::Packed& dS, int owner) const {
    const int lane = thread % 32, warp = thread / 32;
    const unsigned chunk = ptx::shared_address(shared.dS[owner][warpgroup]);
    const char* base = reinterpret_cast<const char*>(shared.dS[owner][warpgroup]);
#pragma unroll
    for (int step = 0; step < tile_rows / 16; ++step) {
      const int q = 16 * step + (lane & 7) + 8 * (lane >> 4);
      const unsigned address = swizzled(chunk, q, 2 * warp + (lane >> 3 & 1));
      ptx::stmatrix_x4_trans(const_cast<char*>(base + (address - chunk)), dS[step][0], dS[step][1], dS[step][2],
                             dS[step][3]);
    }
  }

  /// The warpgroup that makes dQ of a step.
  __device__ __forceinline__ int owner_of(unsigned step) const {
    return static_cast<int>((S::skips_first_step ? step - first_step : step) % S::warpgroups);
  }

  /// Gives this warpgroup's dS of a step to the step's owner.
  __device__ __forceinline__ void send_dS(const typename Math::Packed& dS, unsigned step) const {
    const int owner_idx = owner_of(step);
    // The owner's product has read the buffer's earlier dS. The owner itself waited for its own product.
    if (owner_idx != warpgroup && step >= first_step + S::warpgroups)
      ptx::barrier_sync_apart(barrier_dS_read + owner_idx, S::warpgroups * wg_threads);
    store_dS(dS, owner_idx);
    signal_owner(owner_idx);
  }
  __device__ __forceinline__ void signal_owner(int owner_idx) const {
    ptx::fence_async_shared();  // dS before the product that reads it
    if (owner_idx != warpgroup) ptx::barrier_arrive(barrier_dS_written + owner_idx, S::warpgroups * wg_threads);
  }

  /// A tile of dQ to the staging buffer, which is free, each warp its 16 rows, in the order of its registers.
  template <int width, typename Halfway = Nothing>
  __device__ __forceinline__ void stage(const float (&tile)[width / 2], Halfway halfway = {}) const {
    static_assert(width <= S::width);
    const int lane = thread % 32, warp = thread / 32;
    float* staging = shared.dQ[warpgroup][warp];
#pragma unroll
    for (int group = 0; group < width / 8; ++group) {
      if (group == width / 16) halfway();
      ptx::store_shared(
          ptx::shared_address(staging + (group * 32 + lane) * 4),
          ptx::Vector<float, 4>{tile[4 * group], tile[4 * group + 1], tile[4 * group + 2], tile[4 * group + 3]});
    }
  }

  /// Of how many steps before this one the warpgroup was the owner, in all tasks.
  __device__ __forceinline__ unsigned owned_before(unsigned step) const {
    if constexpr (S::skips_first_step) return owned + (step - first_step + 1 - warpgroup) / 2;
    return (step + S::warpgroups - 1 - warpgroup) / S::warpgroups;
  }
  /// dQ of the steps it owned before this one has left the staging buffer.
  __device__ __forceinline__ void await_sender(unsigned step) const {
    ptx::mbarrier_wait(shared.dQ_empty[warpgroup], owned_before(step) % 2 ^ 1);
  }
  /// dQ of a step has been staged.
  __device__ __forceinline__ void signal_sender(int step) const {
    const int thread = fresh_thread();
    ptx::fence_async_shared();  // the numbers before the copy that reads them
    if (thread == 0) shared.dQ_step[warpgroup] = step;
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared.dQ_full[warpgroup]);
  }

  /// After the last task, whose dQ has left the staging buffer.
  __device__ __forceinline__ void stop_sender() const {
    if constexpr (!S::separate_dq && !S::direct_dq) signal_sender(no_step);
  }

  /// Where no product brings the threads of the warpgroup together: none waits any more for a phase that the rest has seen.
  __device__ __forceinline__ void await_all_threads() const {
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);
  }
  /// This warpgroup is done with K and V of the task.
  __device__ __forceinline__ void release_keys() const {
    if (leads()) ptx::mbarrier_arrive(shared.KV_empty);
  }

  /// dQ of a step of which this warpgroup is the owner.
  template <bool last = false, typename Halfway = Nothing>
  __device__ __forceinline__ void make_dQ(unsigned step, Halfway halfway = {}) const {
    float dQ[S::width / 2];
    begin_dQ(dQ);
    ptx::wgmma_wait<0>();  // dQ is complete
    ptx::wgmma_pin(dQ);
    if constexpr (last) release_keys();  // the next keys come while dQ is sent away
    // dS may be overwritten; signalled only if that happens, so that no arrival is left over.
    if (step + S::warpgroups < end_step) ptx::barrier_arrive(barrier_dS_read + warpgroup, S::warpgroups * wg_threads);
    if constexpr (S::direct_dq) {
      write_dQ(step, dQ);
      halfway();
    } else {
      await_sender(step);
      stage<S::width>(dQ, halfway);
      signal_sender(static_cast<int>(step));
    }
  }
  /// There are no other keys: to the rows themselves.
  __device__ __forceinline__ void write_dQ(unsigned step, const float (&dQ)[S::width / 2]) const {
    const Step& here = shared.step[step % steps_kept];
    const int thread = fresh_thread(), warp = thread / 32;
    const auto rows = tile::query_rows<typename S::Element, config.features>(args.dQ, task().sequence, here.head_idx);
    __syncwarp();  // all lanes have read what was staged before
    write_staged_rows<type, config.head_dim, S::width>(rows.from(here.q_begin + 16 * warp), dQ, args.scale,
                                                       shared.dQ[warpgroup][warp], thread % 32);
  }
  __device__ __forceinline__ void begin_dQ(float (&dQ)[S::width / 2]) const {
    ptx::barrier_sync(barrier_dS_written + warpgroup, S::warpgroups * wg_threads);  // dS of all warpgroups is written
    issue_dQ(dQ, ptx::registers_fresh(0));
  }
};

}  // namespace flash_attention::backward_sm90
