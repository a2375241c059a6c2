#pragma once

// dK and dV for sm_90 (Hopper), head dimensions from 136 to 256: both do not fit into one warpgroup's registers.
//
// A block holds K and V of 64 keys of one key head and walks over the query tiles (64 rows) of every query head of the
// group. Its two warpgroups share the work of a step:
//
//     warpgroup 0:   S^T = K Q^T      P^T = 2^(S^T - lse2)          dV += P^T dO
//     warpgroup 1:   dP^T = V dO^T    dS^T = P^T (dP^T - delta)     dK += dS^T Q
//
// P goes from one to the other through shared memory, in the order of the registers. dQ is backward/sm90_dq.cuh's.

#include "backward/sm90.cuh"

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

  Chunk K[1][S::chunks];
  Chunk V[1][S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[S::stages][S::chunks_v];
  ptx::Vector<unsigned, 4> P[P_slots][4][wg_threads];  // [slot][four registers][thread]
  float lse2[S::stages][tile_rows];
  float delta[S::stages][tile_rows];
  ptx::Mbarrier full[S::stages], free[S::stages], KV_full;
};

template <BackwardConfig config>
struct WideWorker {
  using S = Shape<config>;
  using Math = Scores<config, Rows::keys, tile_rows>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  WideStorage<config>& shared;
  const Task<config>& task;
  const int thread;  // in the warpgroup

  /// Calls use(math) with the scores of a step.
  template <typename Use>
  __device__ __forceinline__ void with_scores(int step, Use use) const {
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

  /// Waits for the tile of a step.
  __device__ __forceinline__ int await(int step, int warpgroup) const {
    const Turn<S::stages> turn(step);
    ptx::mbarrier_wait(shared.full[turn.slot], turn.parity);  // Q, dO and the statistics have landed
    clear_foreign_rows<config>(shared, turn.slot, warpgroup, thread, task.sequence.len_q - task.q_begin_of(step));
    return turn.slot;
  }
  __device__ __forceinline__ void release(int step) const {
    if (thread == 0) ptx::mbarrier_arrive(shared.free[Turn<S::stages>(step).slot]);
  }
  __device__ __forceinline__ auto rows_of(const TensorView& view) const {
    return tile::key_rows<typename S::Element, config.features>(view, task.sequence, task.kv_head_idx).from(task.kv_begin);
  }

  // Both walk the steps alike: the first product of a step is issued together with the last product of the step before, and
  // the arithmetic between them runs under the latter.

  __device__ __forceinline__ void make_dV() const {
    float dV[S::width_v / 2], St[tile_rows / 2];
    typename Math::Packed P;
#pragma unroll
    for (float& x : dV) x = 0;
    const auto issue_S = [&](int slot, int fresh) {
      ptx::wgmma_fence();  // the registers of S have been used for other things
      issue_dots<type, S::steps>(St, shared.K[0], shared.Q[slot], fresh);
    };
    // `weights` is P as dV needs it. It is packed only when the product that reads P's registers is done.
    const auto make_P = [&](int step, int slot, typename Math::Tile& weights) {
      with_scores(step, [&](const Math& math) {
        typename Math::Marks marks;
        math.probabilities(
            St, marks, [&](int i) { return math.along_columns(shared.lse2[slot], i); },
            [&](int i, float p, float q) { weights[i] = p, weights[i + 1] = q; });
      });
    };
    typename Math::Tile weights;
    const auto pack_and_send = [&](int step) {
      Math::pack(weights, P);
      ptx::wgmma_pin(P);
      if constexpr (config.features.dropout || config.features.softcap) {
        typename Math::Packed before_dropout;
        Math::pack(St, before_dropout);
        send_P(step, before_dropout);
      } else {
        send_P(step, P);
      }
    };
    if (task.num_steps > 0) {
      int slot = await(0, 0);
      issue_S(slot, ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // S is there
      ptx::wgmma_pin(St);
      make_P(0, slot, weights);
      pack_and_send(0);
#pragma unroll 1
      for (int step = 1; step < task.num_steps; ++step) {
        const int before = slot, fresh = ptx::registers_fresh(0);
        slot = await(step, 0);
        issue_S(slot, fresh);
        issue_rows<type, S::width_v>(dV, P, shared.dO[before], fresh);
        ptx::wgmma_wait<1>();  // S is there; dV of the step before may still run
        ptx::wgmma_pin(St);
        make_P(step, slot, weights);
        ptx::wgmma_wait<0>();  // that dV is done: P and the slot are free
        ptx::wgmma_pin(dV);
        ptx::wgmma_pin(P);
        release(step - 1);
        pack_and_send(step);
      }
      issue_rows<type, S::width_v>(dV, P, shared.dO[slot], ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dV is complete
      ptx::wgmma_pin(dV);
      ptx::wgmma_pin(P);
    }
    // The last reads of P have been announced; nobody may leave those arrivals behind.
#pragma unroll 1
    for (int slot = 0; slot < tile::smaller(P_slots, task.num_steps); ++slot)
      ptx::barrier_sync(barrier_P_read + slot, wide_warpgroups * wg_threads);
    write_rows<type, config.head_dim_v>(rows_of(args.dV), dV, 1, thread);
  }

  __device__ __forceinline__ void make_dK() const {
    float dK[S::width / 2], dPt[tile_rows / 2];
    typename Math::Packed dS;
#pragma unroll
    for (float& x : dK) x = 0;
    const auto issue_dP = [&](int slot, int fresh) {
      ptx::wgmma_fence();  // the registers of dP have been used for other things
      issue_dots<type, S::steps_v>(dPt, shared.V[0], shared.dO[slot], fresh);
    };
    const auto make_dS = [&](int step, int slot) {
      with_scores(step, [&](const Math& math) {
        typename Math::Marks marks;
        math.mark(marks);
        float P[tile_rows / 2];
        receive_P(step, P);
        math.gradients(P, dPt, marks, [&](int i) { return math.along_columns(shared.delta[slot], i); });
      });
    };
    if (task.num_steps > 0) {
      int slot = await(0, 1);
      issue_dP(slot, ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dP is there
      ptx::wgmma_pin(dPt);
      make_dS(0, slot);
      Math::pack(dPt, dS);
      ptx::wgmma_pin(dS);
#pragma unroll 1
      for (int step = 1; step < task.num_steps; ++step) {
        const int before = slot, fresh = ptx::registers_fresh(0);
        slot = await(step, 1);
        issue_dP(slot, fresh);
        issue_rows<type, S::width>(dK, dS, shared.Q[before], fresh);
        ptx::wgmma_wait<1>();  // dP is there; dK of the step before may still run
        ptx::wgmma_pin(dPt);
        make_dS(step, slot);
        ptx::wgmma_wait<0>();  // that dK is done: dS and the slot are free
        ptx::wgmma_pin(dK);
        ptx::wgmma_pin(dS);
        release(step - 1);
        Math::pack(dPt, dS);
        ptx::wgmma_pin(dS);
      }
      issue_rows<type, S::width>(dK, dS, shared.Q[slot], ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dK is complete
      ptx::wgmma_pin(dK);
      ptx::wgmma_pin(dS);
    }
    write_rows<type, config.head_dim>(rows_of(args.dK), dK, args.scale, thread);
  }

 private:
  /// P before dropout and with the slope of the soft cap, as dS needs it: each thread's registers to the same thread of the
  /// other warpgroup.
  __device__ __forceinline__ void send_P(int step, const typename Math::Packed& P) const {
    const int slot = step % P_slots;
    // The other warpgroup has taken what was in the slot.
    if (step >= P_slots) ptx::barrier_sync(barrier_P_read + slot, wide_warpgroups * wg_threads);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      ptx::store_shared(ptx::shared_address(&shared.P[slot][part][thread]),
                        ptx::Vector<unsigned, 4>{P[part][0], P[part][1], P[part][2], P[part][3]});
    }
    ptx::barrier_arrive(barrier_P_written + slot, wide_warpgroups * wg_threads);
  }

  __device__ __forceinline__ void receive_P(int step, float (&P)[tile_rows / 2]) const {
    const int slot = step % P_slots;
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
  const Task<config> task(args);
  if (task.kv_begin >= task.sequence.rows_kv) return;
  static_assert(sizeof(WideStorage<config>) <= backward_sm90_wide_shared_bytes(config));
  auto& shared = ptx::shared_storage<WideStorage<config>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.full[s], 1);
      ptx::mbarrier_init(shared.free[s], wide_warpgroups);
    }
    ptx::mbarrier_init(shared.KV_full, 1);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  __syncthreads();  // everyone sees the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    ptx::registers_decrease<24>();
    if (threadIdx.x == 0) load(args, shared, task);
  } else {
    ptx::registers_increase<240>();
    const WideWorker<config> worker{args, shared, task, static_cast<int>(threadIdx.x) % wg_threads};
    ptx::mbarrier_wait(shared.KV_full, 0);  // K and V have landed
    if (warpgroup == 1) {
      worker.make_dV();
    } else {
      worker.make_dK();
    }
  }
}

}  // namespace flash_attention
