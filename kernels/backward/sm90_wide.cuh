#pragma once

// dK and dV for sm_90 (Hopper), head dimensions from 136 to 256: both do not fit into one warpgroup's registers.
//
// A task is 64 keys of one key head: K and V stay in shared memory while its block walks over the query tiles (64 rows) of
// every query head of the group. Two warpgroups share the work of a step:
//
//     warpgroup 0:   S^T = K Q^T      P^T = 2^(S^T - lse2)          dV += P^T dO
//     warpgroup 1:   dP^T = V dO^T    dS^T = P^T (dP^T - delta)     dK += dS^T Q
//
// P goes from one to the other through shared memory, in the order of the registers. dQ is backward/sm90_dq.cuh's.
//
// Each warpgroup issues the last product of a step together with the first of the next, in this order: the former frees a
// slot, which is loaded again while the latter runs, and what one warpgroup computes between its products runs under the
// other's. A block takes one task after another; K and V of the next are loaded while the gradients of this one are stored.

#include "backward/sm90.cuh"
#include "backward/sm90_tasks.cuh"

namespace flash_attention {
namespace backward_sm90 {
constexpr int wide_warpgroups = 2;
constexpr int P_slots = 2;

/// Followed by one for each slot of P.
enum WideBarrier : int { barrier_P_written = 1, barrier_P_read = 3 };

template <BackwardConfig config>
struct alignas(1024) WideStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  Chunk K[S::chunks];
  Chunk V[S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[S::stages][S::chunks_v];
  ptx::Vector<unsigned, 4> P[P_slots][4][wg_threads];  // [slot][four registers][thread]
  float lse2[S::stages][tile_rows];                    // lse2 and delta come with Q
  float delta[S::stages][tile_rows];
  ptx::Mbarrier K_full, K_free, Q_full[S::stages], Q_free[S::stages];
  ptx::Mbarrier V_full, V_free, dO_full[S::stages], dO_free[S::stages];
  TaskQueue tasks;
};

/// Of the whole kernel.
template <BackwardConfig config>
__device__ __forceinline__ int count_key_tasks(const AttentionArgs& args) {
  return tile::ceil_div(args.seq_kv, config.block_kv) * args.heads_kv * args.batch;
}

/// The loads of one lane. Another loads V and dO.
template <BackwardConfig config>
struct WideLoader {
  using S = Shape<config>;
  using Storage = WideStorage<config>;

  const AttentionArgs& args;
  Storage& shared;
  unsigned tiles = 0;  // of K or V so far
  unsigned steps = 0;

  /// K, then Q and the statistics of every step.
  __device__ __forceinline__ void load_K_Q(const Task<config>& task) {
    if (task.num_steps == 0) return;
    ptx::mbarrier_wait(shared.K_free, (tiles++ & 1) ^ 1);  // the last product with the task before's K is done
    load_tile(shared.K, shared.K_full, map_K, start_kv(task), task.kv_head_idx, task, 0);
    const float* lse2 = workspace<float>(args, workspace_lse2);
    const float* delta = workspace<float>(args, workspace_delta);
#pragma unroll 1
    for (int step = 0; step < task.num_steps; ++step) {
      const Turn<S::stages> turn(steps++);
      const int head_idx = task.head_of(args, step), q_begin = task.q_begin_of(step);
      const long long padded = head_idx * padded_rows(args) + padded_start(args, task.sequence) + q_begin;
      // Both warpgroups are done with the slot's earlier tile. Slots start out free: parity 1 counts as completed.
      ptx::mbarrier_wait(shared.Q_free[turn.slot], turn.parity ^ 1);
      load_tile(shared.Q[turn.slot], shared.Q_full[turn.slot], map_Q, start_q(task) + q_begin, head_idx, task,
                2 * tile_rows * 4);
      ptx::bulk_load(shared.lse2[turn.slot], lse2 + padded, tile_rows * 4, shared.Q_full[turn.slot]);
      ptx::bulk_load(shared.delta[turn.slot], delta + padded, tile_rows * 4, shared.Q_full[turn.slot]);
    }
  }

  /// V, then dO of every step.
  __device__ __forceinline__ void load_V_dO(const Task<config>& task) {
    if (task.num_steps == 0) return;
    ptx::mbarrier_wait(shared.V_free, (tiles++ & 1) ^ 1);  // the last product with the task before's V is done
    load_tile(shared.V, shared.V_full, map_V, start_kv(task), task.kv_head_idx, task, 0);
#pragma unroll 1
    for (int step = 0; step < task.num_steps; ++step) {
      const Turn<S::stages> turn(steps++);
      ptx::mbarrier_wait(shared.dO_free[turn.slot], turn.parity ^ 1);  // both warpgroups are done with the earlier tile
      load_tile(shared.dO[turn.slot], shared.dO_full[turn.slot], map_dO, start_q(task) + task.q_begin_of(step),
                task.head_of(args, step), task, 0);
    }
  }

 private:
  __device__ __forceinline__ static int start_q(const Task<config>& task) {
    return static_cast<int>(task.sequence.start_q);
  }
  __device__ __forceinline__ static int start_kv(const Task<config>& task) {
    return static_cast<int>(task.sequence.start_kv) + task.kv_begin;
  }
  template <int chunks>
  __device__ __forceinline__ void load_tile(typename Storage::Chunk (&tile)[chunks], ptx::Mbarrier& full, Map map, int row,
                                            int head_idx, const Task<config>& task, int more_bytes) const {
    const int batch_idx = config.features.packed ? 0 : task.sequence.batch_idx;
    ptx::mbarrier_arrive_expect_tx(full, chunks * chunk_bytes + more_bytes);
#pragma unroll
    for (int c = 0; c < chunks; ++c)
      ptx::tma_load_4d(tile[c], args.maps[map], full, c * chunk_dim, row, head_idx, batch_idx);
  }
};

template <BackwardConfig config>
struct WideWorker {
  using S = Shape<config>;
  using Math = Scores<config, Rows::keys, tile_rows>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  WideStorage<config>& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  unsigned tiles = 0;       // of keys before this task that had steps
  unsigned first_step = 0;  // steps before this task

  __device__ __forceinline__ void run() {
    shared.tasks.follow(count_key_tasks<config>(args), [&](int task_idx) {
      const Task<config> task(args, task_idx);
      if (task.kv_begin >= task.sequence.rows_kv) return;
      if (warpgroup == 0) {
        make_dV(task);
      } else {
        make_dK(task);
      }
      first_step += task.num_steps;
      tiles += task.num_steps > 0;
    });
    // The last reads of P have been announced; nobody may leave those arrivals behind.
    if (warpgroup == 0) {
#pragma unroll 1
      for (unsigned slot = 0; slot < P_slots && slot < first_step; ++slot)
        ptx::barrier_sync(barrier_P_read + slot, wide_warpgroups * wg_threads);
    }
  }

 private:
  __device__ __forceinline__ void make_dV(const Task<config>& task) const {
    float dV[S::width_v / 2], St[tile_rows / 2];
    typename Math::Packed P;
#pragma unroll
    for (float& x : dV) x = 0;
    const auto issue_S = [&](int step, int fresh) {
      await_Q(task, step);
      ptx::wgmma_fence();  // the registers of S have been used for other things
      issue_dots<type, S::steps>(St, shared.K, shared.Q[slot_of(step)], fresh);
    };
    const auto issue_dV = [&](int step, int fresh) {
      await_dO(task, step);
      issue_rows<type, S::width_v>(dV, P, shared.dO[slot_of(step)], fresh);
    };
    const auto make_P = [&](int step) {
      ptx::wgmma_wait<0>();  // S is there
      ptx::wgmma_pin(St);
      if (step + 1 == task.num_steps) release(shared.K_free);
      with_scores(task, step, [&](const Math& math) {
        typename Math::Marks marks;
        math.probabilities(
            St, marks, [&](int i) { return math.along_columns(shared.lse2[slot_of(step)], i); },
            [&](int i, float p, float q) { P[i / 8][i / 2 % 4] = ptx::pack<type>(p, q); });
      });
      ptx::wgmma_pin(P);
      release(shared.Q_free[slot_of(step)]);
      if constexpr (config.features.dropout || config.features.softcap) {
        typename Math::Packed before_dropout;
        Math::pack(St, before_dropout);
        send_P(step, before_dropout);
      } else {
        send_P(step, P);
      }
    };
    if (task.num_steps > 0) {
      ptx::mbarrier_wait(shared.K_full, tiles & 1);  // K has landed
      issue_S(0, ptx::registers_fresh(0));
      make_P(0);
#pragma unroll 1
      for (int step = 1; step < task.num_steps; ++step) {
        const int fresh = ptx::registers_fresh(0);
        issue_dV(step - 1, fresh);
        issue_S(step, fresh);
        ptx::wgmma_wait<1>();  // dV is done: P and the slot are free; S may still run
        ptx::wgmma_pin(dV);
        ptx::wgmma_pin(P);
        release(shared.dO_free[slot_of(step - 1)]);
        make_P(step);
      }
      issue_dV(task.num_steps - 1, ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dV is complete
      ptx::wgmma_pin(dV);
      ptx::wgmma_pin(P);
      release(shared.dO_free[slot_of(task.num_steps - 1)]);
    }
    write_rows<type, config.head_dim_v>(rows_of(task, args.dV), dV, 1, thread);
  }

  __device__ __forceinline__ void make_dK(const Task<config>& task) const {
    float dK[S::width / 2], dPt[tile_rows / 2];
    typename Math::Packed dS;
#pragma unroll
    for (float& x : dK) x = 0;
    const auto issue_dP = [&](int step, int fresh) {
      await_dO(task, step);
      ptx::wgmma_fence();  // the registers of dP have been used for other things
      issue_dots<type, S::steps_v>(dPt, shared.V, shared.dO[slot_of(step)], fresh);
    };
    const auto issue_dK = [&](int step, int fresh) { issue_rows<type, S::width>(dK, dS, shared.Q[slot_of(step)], fresh); };
    const auto make_dS = [&](int step) {
      ptx::wgmma_wait<0>();  // dP is there
      ptx::wgmma_pin(dPt);
      release(shared.dO_free[slot_of(step)]);
      if (step + 1 == task.num_steps) release(shared.V_free);
      await_Q(task, step);
      with_scores(task, step, [&](const Math& math) {
        typename Math::Marks marks;
        math.mark(marks);
        float P[tile_rows / 2];
        receive_P(step, P);
        math.gradients(P, dPt, marks, [&](int i) { return math.along_columns(shared.delta[slot_of(step)], i); });
      });
      Math::pack(dPt, dS);
      ptx::wgmma_pin(dS);
    };
    if (task.num_steps > 0) {
      ptx::mbarrier_wait(shared.V_full, tiles & 1);  // V has landed
      issue_dP(0, ptx::registers_fresh(0));
      make_dS(0);
#pragma unroll 1
      for (int step = 1; step < task.num_steps; ++step) {
        const int fresh = ptx::registers_fresh(0);
        issue_dK(step - 1, fresh);
        issue_dP(step, fresh);
        ptx::wgmma_wait<1>();  // dK is done: dS and the slot are free; dP may still run
        ptx::wgmma_pin(dK);
        ptx::wgmma_pin(dS);
        release(shared.Q_free[slot_of(step - 1)]);
        make_dS(step);
      }
      issue_dK(task.num_steps - 1, ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dK is complete
      ptx::wgmma_pin(dK);
      ptx::wgmma_pin(dS);
      release(shared.Q_free[slot_of(task.num_steps - 1)]);
    }
    write_rows<type, config.head_dim>(rows_of(task, args.dK), dK, args.scale, thread);
  }

  // -- tiles -------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int slot_of(int step) const { return Turn<S::stages>(first_step + step).slot; }

  __device__ __forceinline__ void await_Q(const Task<config>& task, int step) const {
    const Turn<S::stages> turn(first_step + step);
    ptx::mbarrier_wait(shared.Q_full[turn.slot], turn.parity);  // Q and the statistics have landed
    clear_foreign_rows<config>(shared.Q[turn.slot], warpgroup, thread, task.sequence.len_q - task.q_begin_of(step));
  }
  __device__ __forceinline__ void await_dO(const Task<config>& task, int step) const {
    const Turn<S::stages> turn(first_step + step);
    ptx::mbarrier_wait(shared.dO_full[turn.slot], turn.parity);  // dO has landed
    clear_foreign_rows<config>(shared.dO[turn.slot], warpgroup, thread, task.sequence.len_q - task.q_begin_of(step));
  }
  /// This warpgroup has read a tile for the last time.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }
  __device__ __forceinline__ auto rows_of(const Task<config>& task, const TensorView& view) const {
    return tile::key_rows<typename S::Element, config.features>(view, task.sequence, task.kv_head_idx).from(task.kv_begin);
  }

  /// Calls use(math) with the scores of a step.
  template <typename Use>
  __device__ __forceinline__ void with_scores(const Task<config>& task, int step, Use use) const {
    const int lane = thread % 32, q_begin = task.q_begin_of(step), head_idx = task.head_of(args, step);
    const tile::Sequence sequence = fresh_sequence(task.sequence);
    const tile::Score<config.features> score(args, sequence, head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    const bool all_visible = score.template all_visible<tile_rows, tile_rows>(q_begin, task.kv_begin) &&
                             !(S::foreign_rows && q_begin + tile_rows > score.len_q);
    use(Math{score,
             dropout,
             score.unit_scale() * tile::log2_e,
             q_begin,
             task.kv_begin,
             16 * (thread / 32) + lane / 4,
             2 * (lane % 4),
             !all_visible,
             {false, false}});
  }

  // -- P -----------------------------------------------------------------------------------------------------------------

  /// P before dropout and with the slope of the soft cap, as dS needs it: each thread's registers to the same thread of the
  /// other warpgroup.
  __device__ __forceinline__ void send_P(int step, const typename Math::Packed& P) const {
    const unsigned n = first_step + step, slot = n % P_slots;
    // The other warpgroup has taken what was in the slot.
    if (n >= P_slots) ptx::barrier_sync(barrier_P_read + slot, wide_warpgroups * wg_threads);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      ptx::store_shared(ptx::shared_address(&shared.P[slot][part][thread]),
                        ptx::Vector<unsigned, 4>{P[part][0], P[part][1], P[part][2], P[part][3]});
    }
    ptx::barrier_arrive(barrier_P_written + slot, wide_warpgroups * wg_threads);
  }

  __device__ __forceinline__ void receive_P(int step, float (&P)[tile_rows / 2]) const {
    const unsigned slot = (first_step + step) % P_slots;
    ptx::barrier_sync(barrier_P_written + slot, wide_warpgroups * wg_threads);  // P is there
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const auto four = ptx::load_shared<ptx::Vector<unsigned, 4>>(ptx::shared_address(&shared.P[slot][part][thread]));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        P[8 * part + 2 * x] = ptx::unpack_low<type>(four[x]);
        P[8 * part + 2 * x + 1] = ptx::unpack_high<type>(four[x]);
      }
    }
    ptx::barrier_arrive(barrier_P_read + slot, wide_warpgroups * wg_threads);
  }
};

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_wide_kernel(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  using S = Shape<config>;
  static_assert(sizeof(WideStorage<config>) <= backward_sm90_wide_shared_bytes(config));
  auto& shared = ptx::shared_storage<WideStorage<config>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.Q_full[s], 1);
      ptx::mbarrier_init(shared.Q_free[s], wide_warpgroups);
      ptx::mbarrier_init(shared.dO_full[s], 1);
      ptx::mbarrier_init(shared.dO_free[s], wide_warpgroups);
    }
    ptx::mbarrier_init(shared.K_full, 1);
    ptx::mbarrier_init(shared.K_free, 1);
    ptx::mbarrier_init(shared.V_full, 1);
    ptx::mbarrier_init(shared.V_free, 1);
    shared.tasks.init(wide_warpgroups * wg_threads + 1);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  __syncthreads();  // everyone sees the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    ptx::registers_decrease<40>();
    WideLoader<config> loader{args, shared};
    const int num_tasks = count_key_tasks<config>(args);
    if (threadIdx.x == 0) {
      shared.tasks.take(workspace<unsigned>(args, workspace_tasks) + counter_keys, num_tasks, [&](int task_idx) {
        loader.load_K_Q({args, task_idx});
      });
    }
    if (threadIdx.x == 32) shared.tasks.follow(num_tasks, [&](int task_idx) { loader.load_V_dO({args, task_idx}); });
  } else {
    ptx::registers_increase<232>();
    WideWorker<config>{args, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads}.run();
  }
}

}  // namespace flash_attention
