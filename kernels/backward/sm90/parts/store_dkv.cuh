#pragma once

// The end of a work tile of backward/sm90: dK and dV leave the registers, for their rows or for fp32 sums in memory.

#include "backward/sm90/parts/dq_exchange.cuh"
#include "backward/sm90/parts/ordered_accumulate.cuh"
#include "backward/sm90/prepare.cuh"
#include "backward/sm90/repair.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Epilogue : DqExchange<config> {
  using Base = DqExchange<config>;
  using Base::args, Base::shared, Base::warpgroup, Base::thread, Base::first_step, Base::end_step, Base::task, Base::type;
  using Base::fresh_thread;
  using typename Base::S;

  static constexpr bool may_hide = config.features.has_window() || config.features.dropout;

  /// direct_dq: the statistics of a task's queries, by all warpgroups, to memory, from where they are loaded as elsewhere.
  /// While its keys are in flight: the task is known by its number.
  __device__ __forceinline__ void prepare_queries(int work_tile_idx) const {
    const int task_idx = static_cast<int>(blockIdx.x + work_tile_idx * gridDim.x);
    if (task_idx >= task_order<config>(args).count()) return;
    const auto block = key_block_of<config>(args, task_idx);
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
    const int thread = warpgroup * wg_threads + fresh_thread();
    bool nonfinite = false;
#pragma unroll 1
    for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
      const long long padded = head_idx * padded_rows(args) + padded_start(args, sequence);
      const int rows = tile::ceil_div(args.seq_q, tile_rows) * tile_rows;
      nonfinite |= prepare_rows<config, S::warpgroups * wg_threads, 4>(args, {sequence, head_idx, 0, padded}, rows, thread)
                       .nonfinite;
    }
    ptx::fence_async_global();  // the statistics before their copies; not found by the emulator: one view of global memory
    const bool any_nonfinite = ptx::any(nonfinite);
    __syncwarp();
    if (thread % 32 != 0) return;
    if (any_nonfinite) shared.nonfinite_rows[thread / 32] = true;
    ptx::mbarrier_arrive(shared.prepared);
  }

  /// direct_dq, after all tasks: what 0 * NaN reached in dK and dV, which are in memory. Not after each task: with no
  /// registers left for it the main loop would spill.
  __device__ __forceinline__ void repair_keys() const {
    ptx::barrier_sync(barrier_keys, S::warpgroups * wg_threads);  // everyone has written dK and dV, and its flag
    bool nonfinite = false;
#pragma unroll
    for (int warp = 0; warp < 4 * S::warpgroups; ++warp) nonfinite |= shared.nonfinite_rows[warp];
    if (!nonfinite || fresh_thread() >= 32) return;
    ptx::path<"backward/sm90 looks for keys to repair">();
#pragma unroll 1
    for (int task_idx = blockIdx.x; task_idx < task_order<config>(args).count(); task_idx += gridDim.x) {
      const auto block = key_block_of<config>(args, task_idx);
      const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
      if (warpgroup * tile_rows < sequence.rows_kv)
        Repairer<config, false>{args, sequence, block.head_idx, warpgroup * tile_rows}.run();
    }
  }

  /// What this warp sent before has left the staging buffer.
  __device__ __forceinline__ void await_copies() const {
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
  }
  /// A tile of dK or dV, times a factor, to the staging buffer (SumOrder::by_register). With ordinary stores here the
  /// compiler spills in the main loop at head dimension 128.
  template <int width>
  __device__ __forceinline__ void stage_keys(const float (&tile)[width / 2], float factor) const {
    static_assert(width <= S::width);
    const int lane = thread % 32, warp = thread / 32;
    float* staging = shared.dQ[warpgroup][warp];
    await_copies();
#pragma unroll
    for (int group = 0; group < width / 8; ++group) {
      const auto word = [&](int i) { return __builtin_bit_cast(unsigned, tile[4 * group + i] * factor); };
      ptx::stmatrix_x4(staging + (group * 32 + lane) * 4, word(0), word(1), word(2), word(3));
    }
  }
  /// Adds what each warp has staged to the sums in memory.
  template <int width>
  __device__ __forceinline__ void send(float* sums) const {
    const int lane = thread % 32, warp = thread / 32;
    ptx::fence_async_shared();  // the numbers before the copy that reads them
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_reduce_add(sums + 16 * warp * width, shared.dQ[warpgroup][warp], 16 * width * 4);
      ptx::bulk_commit();
    }
  }

  /// Where those of a warpgroup begin.
  __device__ __forceinline__ long long row_of_sums() const {
    if constexpr (config.split_first) return first_keys_row<config>(args, task().sequence, task().kv_head_idx);
    return padded_key<config>(args, task().sequence, task().kv_head_idx) + task().kv_begin;
  }

  /// Other tasks have dK and dV of the same keys too. The factor of dV is 1, which the compiler does not know: it must not
  /// store the accumulators themselves, which would have to be where the store wants them.
  __device__ __forceinline__ void add_keys_to_sums(const float (&dK)[S::width / 2],
                                                   const float (&dV)[S::width_v / 2]) const {
    const long long row = row_of_sums() + warpgroup * tile_rows;
    const float one = __builtin_bit_cast(float, ptx::registers_fresh(__builtin_bit_cast(int, 1.f)));
    unsigned* const order = dkv_order_of(args, row + warp_keys * (thread / 32));
    const bool in_order = S::ordered && thread % 32 == 0;
    if (in_order) {
      if (task().gqa_split != 0) ptx::path<"backward/sm90 dK added in order">();
      wait_for_order(order, task().gqa_split);
    }
    stage_keys<S::width>(dK, args.scale);
    send<S::width>(workspace<float>(args, Region::dK) + row * S::width);
    stage_keys<S::width_v>(dV, one);
    send<S::width_v>(workspace<float>(args, Region::dV) + row * S::width_v);
    if (in_order) signal_next(order, task().gqa_split + 1);
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();  // this may have been the last task
  }

  /// All products of the task are done: dK and dV to memory.
  __device__ __forceinline__ void finish_task(const float (&dK)[S::width / 2], const float (&dV)[S::width_v / 2]) const {
    if constexpr (!S::separate_dq && !S::direct_dq) this->await_sender(end_step);
    if constexpr (S::direct_dq) __syncwarp();  // all lanes have read what was staged before
    if constexpr (config.key_sums) return add_keys_to_sums(dK, dV);
    if constexpr (config.split_first) {
      if (splits_first<config>(args) && task().kv_begin == 0) {
        ptx::path<"backward/sm90 part of the first keys">();
        if (first_step != end_step) add_keys_to_sums(dK, dV);
        return;
      }
    }
    const int lane = thread % 32;
    const auto rows_of = [&](const TensorView& view) {
      const int kv_begin = task().kv_begin + warpgroup * tile_rows;
      return tile::key_rows<typename S::Element, config.features>(view, task().sequence, task().kv_head_idx).from(kv_begin);
    };
    if constexpr (!S::separate_dq && S::width_v <= S::width) {
      const int warp = thread / 32;
      char* staging = reinterpret_cast<char*>(shared.dQ[warpgroup][warp]);
      write_staged_rows<type, config.head_dim, S::width>(rows_of(args.dK).from(16 * warp), dK, args.scale, staging, lane);
      write_staged_rows<type, config.head_dim_v, S::width_v>(rows_of(args.dV).from(16 * warp), dV, 1,
                                                             staging + 16 * S::width * 2, lane);
    } else {
      write_rows<type, config.head_dim>(rows_of(args.dK), dK, args.scale, thread);
      write_rows<type, config.head_dim_v>(rows_of(args.dV), dV, 1, thread);
    }
  }
};

}  // namespace flash_attention::backward_sm90
