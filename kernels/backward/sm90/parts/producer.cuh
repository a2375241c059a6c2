#pragma once

// The producer warp of backward/sm90. A task is a tile of block_kv keys of one key head; its steps are the pairs (query
// head, query tile) that see some of them. One lane of the warp:
//
//     for each task of the block: number its steps, first_step .. end_step                WorkTile
//       for each step:
//         find it, and which part of it each warpgroup sees                               Step
//         wait until its stage is empty;  Q, dO, lse2, delta -> the stage                 TMA, bulk copies
//         with the first step: wait until K and V of the task before are read;  K, V -> shared
//       the next task: its K and V are prefetched into L2
//
// The first task is the index of the block, later ones come from a counter in the workspace. The producer runs ahead:
// queries of the next task are loaded under the last products of this one.

#include "backward/sm90/parts/bias_tiles.cuh"
#include "backward/sm90/parts/schedule.cuh"
#include "backward/sm90/parts/statistics.cuh"
#include "backward/sm90/parts/step_list.cuh"
#include "ptx/fence.cuh"
#include "ptx/launch.cuh"
#include "ptx/path.cuh"

namespace flash_attention::backward_sm90 {

/// A tile of keys, and its steps (query head, query tile).
template <BackwardConfig config>
struct Task {
  tile::Sequence sequence;
  int kv_head_idx;
  int gqa_split;       // of the group
  int first_head_idx;  // of the query heads
  int kv_begin;
  tile::TileRange tiles;  // query tiles, the same for every head of the group
  int num_steps;
  StepList<config> list;  // if masks choose

  /// Finds a task's tile of keys and its steps. It is written to shared memory, since the producer warp has no
  /// registers for it.
  __device__ __forceinline__ void set(const AttentionArgs& args, const KeyBlock& block) {
    kv_begin = block.tile_idx * config.block_kv;
    const int splits = num_gqa_splits<config>(args), heads = args.group / splits;
    kv_head_idx = block.head_idx / splits;
    gqa_split = block.head_idx % splits;
    first_head_idx = block.head_idx * heads;
    sequence = tile::make_sequence<config.features>(args, block.batch_idx);
    const tile::Visibility<config.features> sight(args, sequence, first_head_idx);
    tiles = sight.template query_tiles<tile_rows, config.block_kv>(kv_begin);
    if (splits_first<config>(args) && block.tile_idx == 0) {
      constexpr int part_tiles = backward_sm90_part_rows / tile_rows;
      tiles.begin = tile::max(tiles.begin, block.part * part_tiles);
      tiles.end = tile::max(tile::min(tiles.end, (block.part + 1) * part_tiles), tiles.begin);
    }
    num_steps = (tiles.end - tiles.begin) * heads;
    if constexpr (StepList<config>::present) {
      list.set(args, sequence, first_head_idx, kv_begin);
      num_steps = list.count(tiles, heads);
    }
  }

  __device__ __forceinline__ int head_of(const AttentionArgs& args, int step) const {
    return first_head_idx + step / (tiles.end - tiles.begin);
  }
  __device__ __forceinline__ int q_begin_of(int step) const {
    return (tiles.begin + step % (tiles.end - tiles.begin)) * tile_rows;
  }
};

/// The queries of a step, and which part of them each warpgroup sees.
struct alignas(8) Step {
  int head_idx;
  int q_begin;
  long long padded;      // first row in the padded layout of the workspace
  unsigned char hidden;  // bit w: warpgroup w sees nothing
  unsigned char edge;    // bit w: warpgroup w does not see everything
  unsigned char words;   // bit w: warpgroup w sees a part, and mask_bits has words for it
  // Of what its sender signals: the KV tile that accumulates into dQ, if sums are ordered; with early_dq the head,
  // counted over the batch.
  int signal_idx;

  template <BackwardConfig config>
  __device__ __forceinline__ void classify(const AttentionArgs& args, const Task<config>& task) {
    const tile::Visibility<config.features> sight(args, task.sequence, head_idx);
    TileWords found{0xffffffffu, 0xffffffffu};  // one load for all warpgroups: the producer has little time
    if constexpr (StepList<config>::present)
      found = task.list.of(head_idx - task.first_head_idx, q_begin / tile_rows, task.kv_begin);
    hidden = edge = 0;
    if constexpr (config.mask_bits) words = 0;
    for (int w = 0; w < Shape<config>::warpgroups; ++w) {
      const int kv_begin = task.kv_begin + w * tile_rows;
      const bool seen = (found.seen >> w & 1) != 0, full = (found.full >> w & 1) != 0;
      if (!seen || sight.template none_visible<tile_rows, tile_rows>(q_begin, kv_begin)) {
        ptx::path<"backward/sm90 skipped step">();
        hidden |= 1 << w;
      }
      if (!full || !sight.template all_visible_but_by_map<tile_rows, tile_rows>(q_begin, kv_begin) ||
          (Shape<config>::next_sequence_rows && q_begin + tile_rows > sight.len_q))
        edge |= 1 << w;
      if constexpr (config.mask_bits) words |= (seen && !full) << w;
    }
  }
};

/// A task of the block. Steps are counted over all its tasks.
template <BackwardConfig config>
struct WorkTile {
  Task<config> task;
  unsigned first_step, end_step;
  // with two warpgroups, which alternate from the first step on: steps that each has owned in earlier tasks
  unsigned owned[2];
  bool exists;  // false: there are no more tasks
};

// The producer is ahead by at most the number of stages in steps, or by one task if that has fewer steps.
constexpr int work_tiles_kept = 4, steps_kept = 8;

/// Prefetches K and V of a task into L2.
template <BackwardConfig config>
__device__ __forceinline__ void prefetch_keys(const AttentionArgs& args, int task_idx) {
  using S = Shape<config>;
  if (task_idx >= task_order<config>(args).count()) return;
  const auto block = key_block_of<config>(args, task_idx);
  const int kv_head_idx = block.head_idx / num_gqa_splits<config>(args);
  const int batch_idx = config.features.packed ? 0 : block.batch_idx;
  int row = block.tile_idx * config.block_kv;
  if constexpr (config.features.packed) row += args.cu_seqlens_kv[block.batch_idx];
#pragma unroll 1
  for (int w = 0; w < S::warpgroups; ++w, row += tile_rows) {
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) ptx::tma_prefetch_4d(args.maps[map_K], c * chunk_dim, row, kv_head_idx, batch_idx);
#pragma unroll
    for (int c = 0; c < S::chunks_v; ++c)
      ptx::tma_prefetch_4d(args.maps[map_V], c * chunk_dim, row, kv_head_idx, batch_idx);
  }
}

/// The producer warp: one lane issues every copy, as far ahead as there are free stages.
template <BackwardConfig config, typename Storage>
__device__ __forceinline__ void produce_work_tiles(const AttentionArgs& args, Storage& shared) {
  using S = Shape<config>;
  unsigned count = 0;  // of steps
  // Where blocks wait for others, all tasks are taken in order, beginning with the first: a block that has not started
  // has none, so no other block waits for it.
  constexpr bool takes_in_order = S::ordered || config.early_dq;
  // If nothing is read from the workspace before the keys, they are prefetched while prepare still runs.
  constexpr bool loads_early = !S::direct_dq && !takes_in_order && !config.features.packed && !StepList<config>::present;
  if constexpr (!loads_early && !S::direct_dq) ptx::griddepcontrol_wait();
  const auto take = [&] { return ptx::atomic_add(workspace<unsigned>(args, Region::tasks) + counter_keys, 1); };
  int task_idx = takes_in_order ? static_cast<int>(take()) : blockIdx.x;
  shared.num_blocks = takes_in_order ? 0 : gridDim.x;
  shared.work_tile[0].owned[0] = shared.work_tile[0].owned[1] = 0;
#pragma unroll 1
  for (int n = 0;;) {
    WorkTile<config>& work_tile = shared.work_tile[n % work_tiles_kept];
    work_tile.exists = task_idx < task_order<config>(args).count();
    work_tile.first_step = count;
    if (!work_tile.exists) {
      ptx::mbarrier_wait(shared.KV_empty, n % 2 ^ 1);
      ptx::mbarrier_arrive(shared.KV_full);
      return;
    }
    work_tile.task.set(args, key_block_of<config>(args, task_idx));
    const Task<config>& task = work_tile.task;
    // the grid has tasks for the longest sequence
    if (config.features.packed && task.kv_begin >= task.sequence.rows_kv) {
      task_idx = static_cast<int>(shared.num_blocks + take());
      continue;
    }
    work_tile.end_step = count + task.num_steps;
    // These are read again from shared memory at each use: this warp has hardly any registers.
    const auto batch_idx = [&] { return config.features.packed ? 0 : task.sequence.batch_idx; };
    const auto load_keys = [&] {
      ptx::mbarrier_wait(shared.KV_empty, n % 2 ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.KV_full, S::kv_bytes);
#pragma unroll 1
      for (int w = 0; w < S::warpgroups; ++w) {
        const int row = static_cast<int>(task.sequence.start_kv) + task.kv_begin + w * tile_rows;
#pragma unroll
        for (int c = 0; c < S::chunks; ++c)
          ptx::tma_load_4d(shared.K[w][c], args.maps[map_K], shared.KV_full, c * chunk_dim, row, task.kv_head_idx,
                           batch_idx());
#pragma unroll
        for (int c = 0; c < S::chunks_v; ++c)
          ptx::tma_load_4d(shared.V[w][c], args.maps[map_V], shared.KV_full, c * chunk_dim, row, task.kv_head_idx,
                           batch_idx());
      }
    };
    const bool no_steps = count == work_tile.end_step, begins = loads_early && n == 0;
    if (begins && no_steps) ptx::griddepcontrol_wait();
    if (begins || no_steps || S::direct_dq) load_keys();
    if (begins) ptx::griddepcontrol_wait();
    int head_idx = task.first_head_idx, q_tile = task.tiles.begin;
    const auto load_rows = [&](auto& chunk, const TensorMap& map, ptx::Mbarrier& full, int c, int row) {
      constexpr int stack = tile::rows_of_query<config.features>;
      if constexpr (stack > 1) {
        ptx::tma_load_5d(chunk, map, full, c * chunk_dim, 0, head_idx, row / stack, batch_idx());
      } else {
        ptx::tma_load_4d(chunk, map, full, c * chunk_dim, row, head_idx, batch_idx());
      }
    };
#pragma unroll 1
    for (; count != work_tile.end_step; ++count) {
      if constexpr (StepList<config>::present) {
        while ((q_tile = task.list.seek(task.tiles, head_idx - task.first_head_idx, q_tile)) == task.tiles.end)
          ++head_idx, q_tile = task.tiles.begin;
      }
      const PipelineState<S::stages> state(count);
      // The step is found before the stage is waited for, because finding it takes long. Its place in shared memory has
      // long been free.
      Step& next = shared.step[count % steps_kept];
      next.head_idx = head_idx;
      next.q_begin = q_tile * tile_rows;
      next.padded = head_idx * padded_rows(args) + padded_start(args, task.sequence) + next.q_begin;
      next.classify<config>(args, task);
      if constexpr (S::ordered) next.signal_idx = task.kv_begin / config.block_kv;
      if constexpr (config.early_dq) next.signal_idx = task.sequence.batch_idx * args.heads_q + head_idx;
      // Every warpgroup is done with the stage's earlier tile. Stages start out empty: phase 1 counts as completed.
      ptx::mbarrier_wait(shared.empty[state.stage], state.phase ^ 1);
      const int row = static_cast<int>(task.sequence.start_q) + next.q_begin;
      ptx::mbarrier_arrive_expect_tx(shared.full[state.stage],
                                     S::tiles_bytes + shared.statistics.stage_bytes + bias_bytes<config>(args));
      load_biases<config>(args, shared, state.stage, task, next);
#pragma unroll(S::next_sequence_rows ? 1 : S::chunks)
      for (int c = 0; c < S::chunks; ++c)
        load_rows(shared.Q[state.stage][c], args.maps[map_Q], shared.full[state.stage], c, row);
#pragma unroll(S::next_sequence_rows ? 1 : S::chunks_v)
      for (int c = 0; c < S::chunks_v; ++c)
        load_rows(shared.dO[state.stage][c], args.maps[map_dO], shared.full[state.stage], c, row);
      if (S::direct_dq && count == work_tile.first_step) {
        ptx::mbarrier_wait(shared.prepared, n % 2);  // the warpgroups have written the statistics
        // they are visible to the copies; the emulator does not miss it: it has one view of global memory
        ptx::fence_async_global();
      }
      shared.statistics.load(args, state.stage, next.padded, shared.full[state.stage]);
      // The first queries are loaded before the keys: unlike these, they need not wait for the end of the task before.
      if (!S::direct_dq && count == work_tile.first_step && !(loads_early && n == 0)) load_keys();
      head_idx = next.head_idx;  // both read again
      q_tile = next.q_begin / tile_rows + 1;
      if (q_tile == task.tiles.end) ++head_idx, q_tile = task.tiles.begin;
    }
    if constexpr (S::skips_first_step) {
      for (int w = 0; w < 2; ++w)
        shared.work_tile[(n + 1) % work_tiles_kept].owned[w] =
            work_tile.owned[w] + (work_tile.end_step - work_tile.first_step + 1 - w) / 2;
    }
    ++n;
    // Without a prepare launch no counter has been zeroed, so tasks are assigned statically; they are equally long.
    task_idx = static_cast<int>(S::direct_dq ? blockIdx.x + n * gridDim.x : shared.num_blocks + take());
    prefetch_keys<config>(args, task_idx);
  }
}

}  // namespace flash_attention::backward_sm90
