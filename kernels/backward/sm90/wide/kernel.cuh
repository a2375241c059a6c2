#pragma once

// dK and dV for sm_90 (Hopper), head dimensions from 136 to 256. dK and dV together do not fit into one warpgroup's
// registers.
//
// A work tile is 64 keys of one key head. V and K (a part of it in registers) stay with the block while it loops over
// the query tiles (64 rows) of every query head of the group. Two warpgroups share the work of a step:
//
//     for each work tile: K, V -> shared
//       for each step (query head, query tile):
//         warpgroup 0, compute_dV:   S^T = K Q^T      P^T = 2^(S^T - lse2)          dV += P^T dO
//         warpgroup 1, compute_dK:   dP^T = V dO^T    dS^T = P^T (dP^T - delta)     dK += dS^T Q
//       dV, dK * scale -> global
//
// P goes from warpgroup 0 to warpgroup 1 through shared memory, in the order of the registers.
// backward/sm90/separate_dq/kernel.cuh computes dQ.
//
// Each warpgroup issues the first product of a step before the last product of the step before, and computes while that
// one runs.
//
// Warps: of warpgroup 0 one lane loads K and Q, another V and dO (wide/storage.cuh). Warpgroup 1 computes dV, warpgroup 2
// dK. Registers: 240 for dV (128 of them; S 32, P 16, K 32), 232 for dK (128; dP 32, dS 16, P 32). Shared memory: K
// (without the columns in registers), V, a ring of Q and one of dO, two stages of P.

#include "backward/sm90/wide/exchange.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

namespace flash_attention {
namespace backward_sm90 {
/// Warpgroup 0: computes dV of a task.
template <BackwardConfig config>
__device__ __forceinline__ void compute_dV(const WideWarpgroup<config, 0>& wg, const Task<config>& task) {
  using W = WideWarpgroup<config, 0>;
  using S = Shape<config>;
  using Math = typename W::Math;
  float dV[S::width_v / 2], St[tile_rows / 2];
  typename Math::Packed P;
  zero(dV);
  unsigned K[tile::max(W::register_steps, 1)][4];
  wg.load_K(task, K);
  typename Math::Bias bias;  // of the step whose S is in flight
  const auto issue_S = [&](int step, int fresh) {
    const void* Q = wg.await_Q(task, step);
    ptx::wgmma_fence();  // the registers of S have been used for other things
    const unsigned long long Q_desc = ptx::wgmma_descriptor(Q, 0, 1024) + fresh;
#pragma unroll
    for (int i = 0; i < W::register_steps; ++i)
      ptx::wgmma_rs<S::type, tile_rows, ptx::Major::k>(St, K[i], Q_desc + dots_offset(i), i != 0);
    const unsigned long long K_desc = ptx::wgmma_descriptor(wg.shared.K, 0, 1024) + fresh;
#pragma unroll
    for (int i = W::register_steps; i < S::steps; ++i) {
      ptx::wgmma_ss<S::type, tile_rows, ptx::Major::k, ptx::Major::k>(St, K_desc + dots_offset(i - W::register_steps),
                                                                      Q_desc + dots_offset(i), i != 0);
    }
    ptx::wgmma_commit();
    wg.load_bias(task, step, bias);
  };
  const auto issue_dV = [&](int step, int fresh) {
    issue_rows<S::type, S::width_v>(dV, P, wg.await_dO(task, step), fresh);
  };
  // S becomes P while dV of the step before still reads P's registers, so P is packed into them later.
  typename Math::Tile weights;  // P as dV needs it
  typename Math::Marks marks;
  // If scores have a slope, dS needs P times the slope and dV needs P.
  constexpr bool has_slope = config.features.softcap || config.features.score_program;
  // Without a slope, dropout is applied when P is packed, from P and the marks. Until then this saves 32 registers.
  constexpr bool drops_late = config.features.dropout && !has_slope;
  const auto make_P = [&](int step) {
    if (step + 1 == task.num_steps) wg.release(wg.shared.K_empty);
    wg.with_scores(task, step, [&](const Math& math) {
      math.bias = bias;
      math.probabilities(
          St, marks, [&](int i) { return math.along_columns(wg.shared.lse2[wg.stage_Q(step)], i); },
          [&](int i, float p, float q) {
            if constexpr (!drops_late) weights[i] = p, weights[i + 1] = q;
          });
    });
    wg.release(wg.shared.Q_empty[wg.stage_Q(step)]);
  };
  const auto pack_and_send = [&](int step) {
    if constexpr (drops_late) {
#pragma unroll
      for (int i = 0; i < tile_rows / 2; ++i) weights[i] = marks.is_dropped(i) ? 0 : St[i];
    }
    Math::pack(weights, P);
    ptx::wgmma_pin(P);
    if constexpr (config.features.dropout || has_slope) {
      typename Math::Packed before_dropout;
      wg.negate_dropped(St, marks);
      Math::pack(St, before_dropout);
      wg.send_P(step, before_dropout);
    } else {
      wg.send_P(step, P);
    }
  };
  if (task.num_steps > 0) {
    ptx::mbarrier_wait(wg.shared.K_full, wg.tiles & 1);  // K has landed
    issue_S(0, ptx::hide_from_compiler(0));
    wg.make_marks(task, 0, marks);
    ptx::wgmma_wait<0>();  // S is complete
    ptx::wgmma_pin(St);
    make_P(0);
    pack_and_send(0);
#pragma unroll 1
    for (int step = 1; step < task.num_steps; ++step) {
      const int fresh = ptx::hide_from_compiler(0);
      issue_S(step, fresh);
      issue_dV(step - 1, fresh);
      wg.make_marks(task, step, marks);
      ptx::wgmma_wait<1>();  // S is complete; dV of the step before may still run
      ptx::wgmma_pin(St);
      make_P(step);
      ptx::wgmma_wait<0>();  // that dV is done: P may be written and the stage filled
      ptx::wgmma_pin(dV);
      ptx::wgmma_pin(P);
      wg.release(wg.shared.dO_empty[wg.stage_dO(step - 1)]);
      pack_and_send(step);
    }
    issue_dV(task.num_steps - 1, ptx::hide_from_compiler(0));
    ptx::wgmma_wait<0>();  // dV is complete
    ptx::wgmma_pin(dV);
    ptx::wgmma_pin(P);
    wg.release(wg.shared.dO_empty[wg.stage_dO(task.num_steps - 1)]);
  }
  write_rows<S::type, config.head_dim_v>(wg.rows_of(task, wg.args.dV), dV, 1, wg.thread);
}

/// Warpgroup 1: computes dK of a task.
template <BackwardConfig config>
__device__ __forceinline__ void compute_dK(const WideWarpgroup<config, 1>& wg, const Task<config>& task) {
  using W = WideWarpgroup<config, 1>;
  using S = Shape<config>;
  using Math = typename W::Math;
  float dK[S::width / 2], dPt[tile_rows / 2];
  typename Math::Packed dS;
  zero(dK);
  const auto issue_dP = [&](int step, int fresh) {
    const void* dO = wg.await_dO(task, step);
    ptx::wgmma_fence();  // the registers of dP have been used for other things
    issue_dots<S::type, S::steps_v>(dPt, wg.shared.V, dO, fresh);
  };
  const auto issue_dK = [&](int step, int fresh) {
    issue_rows<S::type, S::width>(dK, dS, wg.shared.Q[wg.stage_Q(step)], fresh);
  };
  typename Math::Marks early;  // of the step whose dP is in flight, if a mask's bytes are loaded
  const auto ask = [&](int step) { wg.make_early_marks(task, step, early); };
  const auto make_dS = [&](int step) {
    wg.release(wg.shared.dO_empty[wg.stage_dO(step)]);
    if (step + 1 == task.num_steps) wg.release(wg.shared.V_empty);
    wg.await_Q(task, step);
    wg.with_scores(task, step, [&](const Math& math) {
      typename Math::Marks marks;
      wg.marks_of_gradients(math, early, marks);
      float P[tile_rows / 2];
      wg.receive_P(step, P);
      math.template gradients<W::dropped>(P, dPt, marks,
                                          [&](int i) { return math.along_columns(wg.shared.delta[wg.stage_Q(step)], i); });
    });
  };
  if (task.num_steps > 0) {
    ptx::mbarrier_wait(wg.shared.V_full, wg.tiles & 1);  // V has landed
    issue_dP(0, ptx::hide_from_compiler(0));
    ask(0);
    ptx::wgmma_wait<0>();  // dP is complete
    ptx::wgmma_pin(dPt);
    make_dS(0);
    Math::pack(dPt, dS);
    ptx::wgmma_pin(dS);
#pragma unroll 1
    for (int step = 1; step < task.num_steps; ++step) {
      const int fresh = ptx::hide_from_compiler(0);
      if constexpr (S::stages > 2) {
        issue_dP(step, fresh);
        issue_dK(step - 1, fresh);
        ask(step);
        ptx::wgmma_wait<1>();  // dP is complete; dK of the step before may still run
        ptx::wgmma_pin(dPt);
        make_dS(step);
        ptx::wgmma_wait<0>();  // that dK is done: dS may be written and the stage filled
        ptx::wgmma_pin(dK);
        ptx::wgmma_pin(dS);
        wg.release(wg.shared.Q_empty[wg.stage_Q(step - 1)]);
      } else {  // with two stages of Q the other warpgroup waits for this one
        issue_dK(step - 1, fresh);
        issue_dP(step, fresh);
        ptx::wgmma_wait<1>();  // dK is done: dS may be written and the stage filled; dP may still run
        ptx::wgmma_pin(dK);
        ptx::wgmma_pin(dS);
        wg.release(wg.shared.Q_empty[wg.stage_Q(step - 1)]);
        ask(step);
        ptx::wgmma_wait<0>();  // dP is complete
        ptx::wgmma_pin(dPt);
        make_dS(step);
      }
      Math::pack(dPt, dS);
      ptx::wgmma_pin(dS);
    }
    issue_dK(task.num_steps - 1, ptx::hide_from_compiler(0));
    ptx::wgmma_wait<0>();  // dK is complete
    ptx::wgmma_pin(dK);
    ptx::wgmma_pin(dS);
    wg.release(wg.shared.Q_empty[wg.stage_Q(task.num_steps - 1)]);
  }
  write_rows<S::type, config.head_dim>(wg.rows_of(task, wg.args.dK), dK, wg.args.scale, wg.thread);
}

template <BackwardConfig config, int index>
__device__ __forceinline__ void run_tasks(WideWarpgroup<config, index>& wg) {
  if constexpr (index == 1) wg.announce_empty_P();
  wg.shared.tasks.consume(key_tasks<config>(wg.args).count(), [&](int task_idx) {
    const Task<config> task = key_task<config>(wg.args, task_idx);
    if (task.kv_begin >= task.sequence.rows_kv) return;
    if constexpr (index == 0) {
      compute_dV(wg, task);
    } else {
      compute_dK(wg, task);
    }
    wg.first_step += task.num_steps;
    wg.tiles += task.num_steps > 0;
  });
  if constexpr (index == 0) wg.await_last_reads_of_P();
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_wide_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 wide heads">();
  using namespace backward_sm90;
  using S = Shape<config>;
  static_assert(sizeof(WideStorage<config>) <= backward_sm90_wide_shared_bytes(config));
  auto& shared = ptx::shared_storage<WideStorage<config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();  // all threads see the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  if (warpgroup == 0) {
    ptx::registers_decrease<32>();
    WideProducer<config> producer{args, shared};
    const int num_tasks = key_tasks<config>(args).count();
    if (threadIdx.x == 0) {
      shared.tasks.produce(workspace<unsigned>(args, Region::tasks) + counter_keys, num_tasks,
                           [&](int task_idx) { producer.load_K_Q(key_task<config>(args, task_idx)); });
    }
    if (threadIdx.x == 32)
      shared.tasks.consume(num_tasks, [&](int task_idx) { producer.load_V_dO(key_task<config>(args, task_idx)); });
  } else if (warpgroup == 1) {
    ptx::registers_increase<240>();
    WideWarpgroup<config, 0> wg{args, shared, wg_thread()};
    run_tasks(wg);
  } else {
    ptx::registers_increase<232>();
    WideWarpgroup<config, 1> wg{args, shared, wg_thread()};
    run_tasks(wg);
  }
}

}  // namespace flash_attention
