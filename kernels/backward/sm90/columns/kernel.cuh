#pragma once

// Gradients of heads wider than 256 for sm_90 (Hopper), one kernel for each gradient. Nothing is summed in memory, so
// every run has the same bits. A gradient of 64 rows is too wide for one warpgroup's registers: two warpgroups have the
// same rows and half of the columns each.
//
//     dQ: rows are queries, steps are tiles of keys         dK, dV: rows are keys, steps are tiles of queries
//
// A task is 64 rows. X, and X' for dP, stay in shared memory while the block loops over the task's steps, two at a
// time, one for each warpgroup:
//
//     S = X Y^T, dP = X' Y'^T of my step             dQ: X, Y = Q, K   X', Y' = dO, V;   dK, dV: the other way round
//     W = P (dV) or dS                               to shared memory; wait for the other's
//     G += W Z over both steps, my columns           Z = K (dQ), Q (dK), dO (dV)
//
// One ring has Y, Y' and Z, in stages of 16 KiB: first 64 columns of Y and of Y' at a time, then all columns of some
// rows of Z.
//
// Two blocks form a cluster. They have 64 rows each, go over the same steps, and each loads half of every stage for
// both. Warps: one lane of warpgroup 0 loads (columns/storage.cuh). Warpgroups 1 and 2 compute with 240 registers a
// thread, of which the gradient takes up to 128.

#include "backward/sm90/columns/products.cuh"
#include "ptx/path.cuh"

namespace flash_attention {
namespace backward_sm90 {

/// A pair of steps, one for each warpgroup.
template <BackwardConfig config, Gradient gradient>
__device__ __forceinline__ void add_pair(ColumnsWarpgroup<config, gradient>& wg, const ColumnsTask<config, gradient>& task,
                                         int pair, float (&G)[Columns<config, gradient>::width / 2]) {
  using C = Columns<config, gradient>;
  using S = Shape<config>;
  using Math = typename ColumnsWarpgroup<config, gradient>::Math;
  const int step = tile::min(pair + wg.index, task.num_steps - 1);
  typename ColumnsWarpgroup<config, gradient>::Statistics statistics{wg};
  int kept;  // rows of Z of both steps
  float scores[tile_rows / 2];
  wg.template make_scores<S::chunks, S::steps>(scores, wg.shared.X, pair > 0, [&] {
    statistics.load(task, task.step(wg.args, step));
    kept = wg.kept_rows(task, pair) | wg.kept_rows(task, tile::min(pair + 1, task.num_steps - 1)) << 16;
  });
  statistics.share();

  // The place of a step is computed again where it is used, because registers are short while the products run.
  const auto place = task.step(wg.args, ptx::hide_from_compiler(step));
  const tile::Sequence sequence = fresh_sequence(task.sequence);
  const tile::Score<config.features> score(wg.args, sequence, place.head_idx);
  const tile::Dropout dropout(wg.args, sequence.batch_idx, place.head_idx);
  const int lane = ptx::hide_from_compiler(wg.thread) % 32;
  const bool edge = !score.sight.template all_visible<tile_rows, tile_rows>(place.q_begin, place.kv_begin) ||
                    ((C::of_queries || S::next_sequence_rows) && place.q_begin + tile_rows > score.sight.len_q);
  const Math math{score,          dropout,        score.unit_scale() * tile::log2_e,
                  place.q_begin,  place.kv_begin, 16 * (ptx::hide_from_compiler(wg.thread) / 32) + lane / 4,
                  2 * (lane % 4), edge,           {false, false}};
  if constexpr (Math::Bias::present)
    math.bias = Math::load_bias(score, place.q_begin, place.kv_begin, ptx::hide_from_compiler(wg.thread));
  typename Math::Packed W;
  typename Math::Marks marks;
  math.mark(marks);
  if constexpr (C::has_dP) {
    math.probabilities(
        scores, marks, [&](int i) { return statistics.lse2(math, i); }, [](int, float, float) {});
    float dP[tile_rows / 2];  // after P, not under it
    wg.template make_scores<S::chunks_v, S::steps_v>(dP, wg.shared.X2, false, [] {});
    math.gradients(scores, dP, marks, [&](int i) { return statistics.delta(math, i); });
    Math::pack(dP, W);
  } else {
    math.probabilities(
        scores, marks, [&](int i) { return statistics.lse2(math, i); },
        [&](int i, float p, float q) { W[i / 8][i / 2 % 4] = ptx::pack<S::type>(p, q); });
  }
  if (pair + wg.index >= task.num_steps) {  // there is no such step: the last one runs again, and its W is 0
    ptx::path<"backward/sm90 odd step of wide columns">();
#pragma unroll
    for (auto& four : W) {
#pragma unroll
      for (unsigned& word : four) word = 0;
    }
  }
  wg.publish(W);
  wg.add_rows(kept, G);
  wg.phases ^= 1;
}

/// Writes this warpgroup's columns of the rows to memory.
template <BackwardConfig config, Gradient gradient>
__device__ __forceinline__ void store_rows(const ColumnsWarpgroup<config, gradient>& wg,
                                           const ColumnsTask<config, gradient>& task,
                                           const float (&G)[Columns<config, gradient>::width / 2]) {
  using C = Columns<config, gradient>;
  using S = Shape<config>;
  const auto rows = task.result(wg.args);
  const float factor = gradient == Gradient::dV ? 1 : wg.args.scale;
  const int t = ptx::hide_from_compiler(wg.thread), lane = t % 32, first = wg.index * C::width + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * (t / 32) + lane / 4 + 8 * half;
    if (row >= rows.count) continue;
#pragma unroll
    for (int group = 0; group < C::width / 8; ++group) {
      if (first + 8 * group >= C::dim) break;
      const unsigned pair = ptx::pack<S::type>(G[4 * group + 2 * half] * factor, G[4 * group + 2 * half + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(rows.row(row) + first + 8 * group), pair);
    }
  }
}

/// Computes the gradient of a task's rows.
template <BackwardConfig config, Gradient gradient>
__device__ __forceinline__ void compute_rows(ColumnsWarpgroup<config, gradient>& wg,
                                             const ColumnsTask<config, gradient>& task) {
  using C = Columns<config, gradient>;
  float G[C::width / 2];
  zero(G);
  if (task.num_steps > 0) {
    ptx::mbarrier_wait(wg.shared.X_full, wg.phases >> 1 & 1);  // the rows have landed
    wg.phases ^= 2;
#pragma unroll 1
    for (int pair = 0; pair < task.num_steps; pair += 2) add_pair(wg, task, pair, G);
    wg.finish_rows(G);
    wg.release(wg.shared.X_empty);
  }
  store_rows(wg, task, G);
}

template <BackwardConfig config, Gradient gradient>
__device__ __forceinline__ void run_tasks(ColumnsWarpgroup<config, gradient>& wg) {
  int n;
  ColumnsTask<config, gradient>::for_each(wg.args, n, [&](const auto& task) {
    auto& kept = wg.shared.tasks[wg.index];  // in shared memory: registers are short
    if (wg.thread == 0) kept = task;
    ptx::barrier_sync(barrier_warpgroup + wg.index, wg_threads);  // all may read it
    compute_rows(wg, kept);
    ptx::barrier_sync(barrier_warpgroup + wg.index, wg_threads);  // all have read it
  });
}

template <BackwardConfig config, Gradient gradient>
__device__ __forceinline__ void compute_columns(const AttentionArgs& args) {
  using Storage = ColumnsStorage<config, gradient>;
  static_assert(sizeof(Storage) <= backward_sm90_columns_shared_bytes(config, gradient != Gradient::dV));
  auto& shared = ptx::shared_storage<Storage>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.X_full, 1);
    ptx::mbarrier_init(shared.X_empty, columns_warpgroups);
    for (auto& barrier : shared.full) ptx::mbarrier_init(barrier, 1);
    for (auto& barrier : shared.empty) ptx::mbarrier_init(barrier, columns_cluster * columns_warpgroups);
    ptx::mbarrier_init(shared.W_full, columns_warpgroups * wg_threads / 32);
    ptx::mbarrier_init(shared.W_empty, columns_warpgroups);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // everyone sees the barriers of both blocks

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  if (warpgroup == 0) {
    ptx::registers_decrease<24>();
    if (threadIdx.x == 0) ColumnsProducer<config, gradient>{args, shared}.run();
  } else {
    ptx::registers_increase<240>();
    ColumnsWarpgroup<config, gradient> wg{args, shared, warpgroup - 1, wg_thread()};
    run_tasks(wg);
  }
  __syncwarp();  // the cluster's barrier needs the lanes of a warp together; the emulator does not miss it
  ptx::cluster_arrive();
  ptx::cluster_wait();  // no block ends before the other one has sent the last signal for its stages
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_columns_dq(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dQ by columns">();
  backward_sm90::compute_columns<config, backward_sm90::Gradient::dQ>(args);
}
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_columns_dk(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dK by columns">();
  backward_sm90::compute_columns<config, backward_sm90::Gradient::dK>(args);
}
template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_columns_dv(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dV by columns">();
  backward_sm90::compute_columns<config, backward_sm90::Gradient::dV>(args);
}

}  // namespace flash_attention
