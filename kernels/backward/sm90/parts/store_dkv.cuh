#pragma once

// The end of a task of backward/sm90: dK and dV go from registers to their rows or to fp32 sums in memory. If a task's
// tile has all keys of a head (direct_dq), the task also prepares its queries and repairs its keys, here.

#include "backward/sm90/parts/dq_exchange.cuh"
#include "backward/sm90/parts/ordered_sums.cuh"
#include "backward/sm90/prepare.cuh"
#include "backward/sm90/repair.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

// -- direct_dq
// --------------------------------------------------------------------------------------------------------------

/// All warpgroups write the statistics of a task's queries to memory; they are loaded from there as in other modes. The
/// task's keys are still being loaded, so only its number is known here.
template <BackwardConfig config>
__device__ __forceinline__ void prepare_queries(const Warpgroup<config>& wg, int work_tile_idx) {
  using S = Shape<config>;
  const AttentionArgs& args = wg.args;
  const int task_idx = static_cast<int>(blockIdx.x + work_tile_idx * gridDim.x);
  if (task_idx >= task_order<config>(args).count()) return;
  const auto block = key_block_of<config>(args, task_idx);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int thread = wg.index * wg_threads + fresh_thread();
  bool nonfinite = false;
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const long long padded = head_idx * padded_rows(args) + padded_start(args, sequence);
    const int rows = tile::ceil_div(args.seq_q, tile_rows) * tile_rows;
    nonfinite |=
        prepare_rows<config, S::warpgroups * wg_threads, 4>(args, {sequence, head_idx, 0, padded}, rows, thread).nonfinite;
  }
  // the statistics are visible to their copies; the emulator does not miss it: it has one view of global memory
  ptx::fence_async_global();
  const bool any_nonfinite = ptx::any(nonfinite);
  __syncwarp();
  if (thread % 32 != 0) return;
  if (any_nonfinite) wg.shared.nonfinite_rows[thread / 32] = true;
  ptx::mbarrier_arrive(wg.shared.prepared);
}

/// After all tasks: repairs dK and dV, which are in memory, where 0 * NaN reached them. This is not done after each
/// task, because the main loop would have no registers left for it and spill.
template <BackwardConfig config>
__device__ __forceinline__ void repair_keys(const Warpgroup<config>& wg) {
  constexpr int warpgroups = Shape<config>::warpgroups;
  const AttentionArgs& args = wg.args;
  ptx::barrier_sync(barrier_keys, warpgroups * wg_threads);  // all threads have written dK, dV and their flags
  bool nonfinite = false;
#pragma unroll
  for (int warp = 0; warp < 4 * warpgroups; ++warp) nonfinite |= wg.shared.nonfinite_rows[warp];
  if (!nonfinite || fresh_thread() >= 32) return;
  ptx::path<"backward/sm90 looks for keys to repair">();
#pragma unroll 1
  for (int task_idx = blockIdx.x; task_idx < task_order<config>(args).count(); task_idx += gridDim.x) {
    const auto block = key_block_of<config>(args, task_idx);
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
    if (wg.index * tile_rows < sequence.rows_kv)
      Repairer<config, false>{args, sequence, block.head_idx, wg.index * tile_rows}.run();
  }
}

// -- sums of dK and dV
// ------------------------------------------------------------------------------------------------------

/// Stores a tile of dK or dV, times a factor, to the staging buffer (SumOrder::by_register), once the buffer's earlier
/// contents have left it. With ordinary stores to memory here, the compiler spills in the main loop at head dimension
/// 128.
template <int width, BackwardConfig config>
__device__ __forceinline__ void stage_keys(const Warpgroup<config>& wg, const float (&tile)[width / 2], float factor) {
  static_assert(width <= Shape<config>::width);
  const int lane = wg.thread % 32, warp = wg.thread / 32;
  float* staging = wg.shared.dQ[wg.index][warp];
  if (wg.thread % 32 == 0) ptx::bulk_wait_read<0>();
  __syncwarp();
#pragma unroll
  for (int group = 0; group < width / 8; ++group) {
    const auto word = [&](int i) { return __builtin_bit_cast(unsigned, tile[4 * group + i] * factor); };
    ptx::stmatrix_x4(staging + (group * 32 + lane) * 4, word(0), word(1), word(2), word(3));
  }
}

/// Adds what each warp has staged to the sums in memory.
template <int width, BackwardConfig config>
__device__ __forceinline__ void send_keys(const Warpgroup<config>& wg, float* sums) {
  const int lane = wg.thread % 32, warp = wg.thread / 32;
  ptx::fence_async_shared();  // the numbers are visible to the copy that reads them
  __syncwarp();
  if (lane == 0) {
    ptx::bulk_reduce_add(sums + 16 * warp * width, wg.shared.dQ[wg.index][warp], 16 * width * 4);
    ptx::bulk_commit();
  }
}

/// Adds dK and dV to sums in memory, because other tasks have the same keys. dV has the factor 1, which is hidden from
/// the compiler: otherwise it would store the accumulators themselves, and they would have to be in the registers that
/// the store wants.
template <BackwardConfig config>
__device__ __forceinline__ void add_keys_to_sums(const Warpgroup<config>& wg, const float (&dK)[Shape<config>::width / 2],
                                                 const float (&dV)[Shape<config>::width_v / 2]) {
  using S = Shape<config>;
  const AttentionArgs& args = wg.args;
  const long long first = config.split_first
                              ? first_keys_row<config>(args, wg.task().sequence, wg.task().kv_head_idx)
                              : padded_key<config>(args, wg.task().sequence, wg.task().kv_head_idx) + wg.task().kv_begin;
  const long long row = first + wg.index * tile_rows;
  const float one = __builtin_bit_cast(float, ptx::hide_from_compiler(__builtin_bit_cast(int, 1.f)));
  unsigned* const order = dkv_order_of(args, row + warp_keys * (wg.thread / 32));
  const bool in_order = S::ordered && wg.thread % 32 == 0;
  if (in_order) {
    if (wg.task().gqa_split != 0) ptx::path<"backward/sm90 dK added in order">();
    wait_for_order(order, wg.task().gqa_split);
  }
  stage_keys<S::width>(wg, dK, args.scale);
  send_keys<S::width>(wg, workspace<float>(args, Region::dK) + row * S::width);
  stage_keys<S::width_v>(wg, dV, one);
  send_keys<S::width_v>(wg, workspace<float>(args, Region::dV) + row * S::width_v);
  if (in_order) signal_next(order, wg.task().gqa_split + 1);
  if (wg.thread % 32 == 0) ptx::bulk_wait_read<0>();  // this may have been the last task
}

// -- the end of a task
// ------------------------------------------------------------------------------------------------------

/// All products of the task are done. Writes dK and dV to memory by way of the staging buffer of dQ, once the last dQ
/// has left it.
template <BackwardConfig config>
__device__ __forceinline__ void store_dKV(const Warpgroup<config>& wg, const float (&dK)[Shape<config>::width / 2],
                                          const float (&dV)[Shape<config>::width_v / 2]) {
  using S = Shape<config>;
  const AttentionArgs& args = wg.args;
  if constexpr (!S::separate_dq && !S::direct_dq) await_sender(wg, wg.end_step);
  if constexpr (S::direct_dq) __syncwarp();  // all lanes have read the buffer's earlier contents
  if constexpr (config.key_sums) return add_keys_to_sums(wg, dK, dV);
  if constexpr (config.split_first) {
    if (splits_first<config>(args) && wg.task().kv_begin == 0) {
      ptx::path<"backward/sm90 part of the first keys">();
      if (wg.first_step != wg.end_step) add_keys_to_sums(wg, dK, dV);
      return;
    }
  }
  const int lane = wg.thread % 32;
  const auto rows_of = [&](const TensorView& view) {
    const int kv_begin = wg.task().kv_begin + wg.index * tile_rows;
    return tile::key_rows<typename S::Element, config.features>(view, wg.task().sequence, wg.task().kv_head_idx)
        .from(kv_begin);
  };
  if constexpr (!S::separate_dq && S::width_v <= S::width) {
    const int warp = wg.thread / 32;
    char* staging = reinterpret_cast<char*>(wg.shared.dQ[wg.index][warp]);
    write_staged_rows<S::type, config.head_dim, S::width>(rows_of(args.dK).from(16 * warp), dK, args.scale, staging, lane);
    write_staged_rows<S::type, config.head_dim_v, S::width_v>(rows_of(args.dV).from(16 * warp), dV, 1,
                                                              staging + 16 * S::width * 2, lane);
  } else {
    write_rows<S::type, config.head_dim>(rows_of(args.dK), dK, args.scale, wg.thread);
    write_rows<S::type, config.head_dim_v>(rows_of(args.dV), dV, 1, wg.thread);
  }
}

}  // namespace flash_attention::backward_sm90
