#pragma once

// For backward/sm90/wide/kernel.cuh: its shared memory, its tasks, and the two lanes that load (K and Q, V and dO).

#include "backward/sm90/parts/producer.cuh"
#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/schedule.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {
constexpr int wide_warpgroups = 2;
constexpr int P_stages = 2;

/// Each is the first of one for each stage of P.
enum WideBarrier : int { barrier_P_written = 1, barrier_P_read = 3 };

template <BackwardConfig config>
struct alignas(1024) WideStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  static constexpr int register_chunks = backward_sm90_wide_register_chunks(config);  // of K
  static constexpr int stages_dO = 2;  // fewer than of Q, which stays until dK is done, a step later

  Chunk K[S::chunks - register_chunks];
  Chunk V[S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[stages_dO][S::chunks_v];
  ptx::Vector<unsigned, 4> P[P_stages][4][wg_threads];  // [stage][four registers][thread]
  float lse2[S::stages][tile_rows];                     // lse2 and delta are loaded with Q
  float delta[S::stages][tile_rows];
  ptx::Mbarrier K_full, K_empty, Q_full[S::stages], Q_empty[S::stages];
  ptx::Mbarrier V_full, V_empty, dO_full[stages_dO], dO_empty[stages_dO];
  TaskQueue tasks;

  __device__ __forceinline__ void init() {
    for (auto& barrier : Q_full) ptx::mbarrier_init(barrier, 1);
    for (auto& barrier : Q_empty) ptx::mbarrier_init(barrier, wide_warpgroups);
    for (auto& barrier : dO_full) ptx::mbarrier_init(barrier, 1);
    for (auto& barrier : dO_empty) ptx::mbarrier_init(barrier, wide_warpgroups);
    ptx::mbarrier_init(K_full, 1);
    ptx::mbarrier_init(K_empty, 1);
    ptx::mbarrier_init(V_full, 1);
    ptx::mbarrier_init(V_empty, 1);
    tasks.init(wide_warpgroups * wg_threads + 1);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
};

template <BackwardConfig config>
__device__ __forceinline__ TaskOrder key_tasks(const AttentionArgs& args) {
  return TaskOrder::make<config>(tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv * args.batch,
                                 args.seq_q * args.group);
}
template <BackwardConfig config>
__device__ __forceinline__ Task<config> key_task(const AttentionArgs& args, int task_idx) {
  const auto place = key_tasks<config>(args)[task_idx];
  Task<config> task;
  task.set(args, {place.tile, place.head % args.heads_kv, place.head / args.heads_kv});
  return task;
}

/// The loads of one lane. Another lane loads V and dO.
template <BackwardConfig config>
struct WideProducer {
  using S = Shape<config>;
  using Storage = WideStorage<config>;

  const AttentionArgs& args;
  Storage& shared;
  unsigned tiles = 0;  // of K or V so far
  unsigned steps = 0;

  /// Loads K, then Q and the statistics of every step.
  __device__ __forceinline__ void load_K_Q(const Task<config>& task) {
    if (task.num_steps == 0) return;
    ptx::mbarrier_wait(shared.K_empty, (tiles++ & 1) ^ 1);  // the last product with K of the task before is done
    load_keys(shared.K, shared.K_full, args.maps[map_K], task, Storage::register_chunks);
    for_each_step(task, [&](int head_idx, int q_begin) {
      const PipelineState<S::stages> state(steps++);
      // Both warpgroups are done with the stage's earlier tile. Stages start out empty: phase 1 counts as completed.
      ptx::mbarrier_wait(shared.Q_empty[state.stage], state.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.Q_full[state.stage], S::chunks * chunk_bytes + 2 * tile_rows * 4);
      load_queries(shared.Q[state.stage], shared.Q_full[state.stage], args.maps[map_Q], task, head_idx, q_begin);
      const long long padded = head_idx * padded_rows(args) + padded_start(args, task.sequence) + q_begin;
      ptx::bulk_load(shared.lse2[state.stage], workspace<float>(args, Region::lse2) + padded, tile_rows * 4,
                     shared.Q_full[state.stage]);
      ptx::bulk_load(shared.delta[state.stage], workspace<float>(args, Region::delta) + padded, tile_rows * 4,
                     shared.Q_full[state.stage]);
    });
  }

  /// Loads V, then dO of every step.
  __device__ __forceinline__ void load_V_dO(const Task<config>& task) {
    if (task.num_steps == 0) return;
    ptx::mbarrier_wait(shared.V_empty, (tiles++ & 1) ^ 1);  // the last product with V of the task before is done
    load_keys(shared.V, shared.V_full, args.maps[map_V], task, 0);
    for_each_step(task, [&](int head_idx, int q_begin) {
      const PipelineState<Storage::stages_dO> state(steps++);
      ptx::mbarrier_wait(shared.dO_empty[state.stage], state.phase ^ 1);  // both warpgroups are done with the earlier tile
      ptx::mbarrier_arrive_expect_tx(shared.dO_full[state.stage], S::chunks_v * chunk_bytes);
      load_queries(shared.dO[state.stage], shared.dO_full[state.stage], args.maps[map_dO], task, head_idx, q_begin);
    });
  }

 private:
  /// Calls use(head_idx, q_begin) for each step, in order.
  template <typename Use>
  __device__ __forceinline__ void for_each_step(const Task<config>& task, Use use) const {
#pragma unroll 1
    for (int head = 0; head < args.group; ++head) {
#pragma unroll 1
      for (int tile = task.tiles.begin; tile < task.tiles.end; ++tile)
        use(task.kv_head_idx * args.group + head, tile * tile_rows);
    }
  }
  __device__ __forceinline__ static int batch_of(const Task<config>& task) {
    return config.features.packed ? 0 : task.sequence.batch_idx;
  }
  template <typename Chunk, int chunks>
  __device__ __forceinline__ static void load_queries(Chunk (&tile)[chunks], ptx::Mbarrier& full, const abi::TensorMap& map,
                                                      const Task<config>& task, int head_idx, int q_begin) {
    load_tile(tile, full, map, static_cast<int>(task.sequence.start_q) + q_begin, head_idx, batch_of(task));
  }
  template <typename Chunk, int chunks>
  __device__ __forceinline__ static void load_keys(Chunk (&tile)[chunks], ptx::Mbarrier& full, const abi::TensorMap& map,
                                                   const Task<config>& task, int first_chunk) {
    ptx::mbarrier_arrive_expect_tx(full, chunks * chunk_bytes);
    load_tile(tile, full, map, static_cast<int>(task.sequence.start_kv) + task.kv_begin, task.kv_head_idx, batch_of(task),
              first_chunk);
  }
};

}  // namespace flash_attention::backward_sm90
