#pragma once

// Attention backward for sm_90 (Hopper) with three warpgroups of 64 keys: head dimensions up to 64, scores without options.
// It computes what backward/sm90/two_warpgroups/kernel.cuh does, from the same parts; the step differs, because a thread
// has 160 registers:
//
//     S^T = K Q^T, dP^T = V dO^T                                 both are waited for: the other warpgroups fill the gap
//     P^T = 2^(S^T - lse2), dS^T = P^T (dP^T - delta)            in one pass, in place: P is not kept in fp32
//     dV += P^T dO, dS to shared memory
//     one of the warpgroups, in turn:         dQ += dS K         of the step before, staged while dK runs
//     dK += dS^T Q                                               then dQ is sent away
//
// dQ comes after dS of this step has been laid down: the next owner waits for that, and not for dQ of this one.
// A load from shared memory takes long under the products' reads. What is the same in all steps of a task and all lanes of
// a warp comes through a shuffle: the compiler then keeps it in uniform registers, of which there are enough.

#include "backward/sm90/two_warpgroups/kernel.cuh"
#include "ptx/path.cuh"

namespace flash_attention {
namespace backward_sm90 {

template <BackwardConfig config>
struct ThreeConsumer {
  using S = Shape<config>;
  using Parts = Epilogue<config>;
  using Math = typename Parts::Math;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  int work_tile_idx = 0;

  // Of the task.
  unsigned first_step = 0, end_step = 0;
  unsigned steady_from = 0;                // from this step on the warpgroup sees the same of all steps
  bool sees_no_key = false, edge = false;  // then it sees nothing; not everything

  // Of the step.
  int stage = 0, phase = 0;

  /// Without a window a task is steady_state from its first step on. Under a causal mask the diagonal crosses the first
  /// steps of a head.
  static constexpr bool reaches_steady_state = !config.features.window_left && !S::next_sequence_rows;
  static constexpr bool all_steps_alike = reaches_steady_state && !config.features.window_right;
  static constexpr int diagonal_steps = S::warpgroups + 1;
  static_assert(S::stages == S::warpgroups);  // the stage of a step is its owner's number

  __device__ __forceinline__ static int thread() { return Parts::fresh_thread(); }
  __device__ __forceinline__ Parts parts() const {
    return {{args, shared, warpgroup, thread(), work_tile_idx, first_step, end_step}};
  }

  __device__ __forceinline__ const WorkTile<config>& work_tile() const {
    return shared.work_tile[work_tile_idx % work_tiles_kept];
  }
  __device__ __forceinline__ const Task<config>& task() const { return work_tile().task; }
  __device__ __forceinline__ const Step& step_at(unsigned step) const { return shared.step[step % steps_kept]; }
  __device__ __forceinline__ bool steady_state(unsigned step) const {
    return all_steps_alike || (reaches_steady_state && step >= steady_from);
  }
  /// Whether this warpgroup owns the step before.
  __device__ __forceinline__ bool owned_last() const {
    return !S::separate_dq && stage == (warpgroup == S::warpgroups - 1 ? 0 : warpgroup + 1);
  }

  float dK[S::width / 2], dV[S::width_v / 2];

  __device__ __forceinline__ void await_step(unsigned step) {
    ptx::mbarrier_wait(shared.full[stage], phase);  // Q, dO and the statistics have landed
    if constexpr (S::next_sequence_rows) {
      const int used_rows = task().sequence.len_q - step_at(step).q_begin;
      clear_next_sequence_rows<config>(shared.Q[stage], warpgroup, thread(), used_rows);
      clear_next_sequence_rows<config>(shared.dO[stage], warpgroup, thread(), used_rows);
    }
  }

  /// dS to the buffer of the step's owner, whose product has read what was in it.
  __device__ __forceinline__ void send_dS(const typename Math::Packed& dS) const {
    ptx::mbarrier_wait(shared.dS_empty[stage], phase ^ 1);
    parts().store_dS(dS, stage);
  }

  /// dQ of a step, which has been waited for, to its staging buffer.
  __device__ __forceinline__ void stage_dQ(const float (&dQ)[S::width / 2], unsigned step) const {
    if (thread() % 32 == 0) ptx::mbarrier_arrive(shared.dS_empty[warpgroup]);
    const Parts parts = this->parts();
    parts.await_sender(step);
    parts.template stage<S::width>(dQ);
  }

  template <bool last = false>
  __device__ __forceinline__ void make_dQ(unsigned step) const {
    float dQ[S::width / 2];
    parts().begin_dQ(dQ);
    ptx::wgmma_wait<0>();  // dQ is complete
    ptx::wgmma_pin(dQ);
    if constexpr (last) parts().release_keys();  // the next keys come while dQ is sent away
    stage_dQ(dQ, step);
    parts().signal_sender(static_cast<int>(step));
  }

  /// P and dS of a step as operands, from S and dP.
  __device__ __forceinline__ void make_operands(unsigned step, typename Math::Packed& P, typename Math::Packed& dS) const {
    const int fresh = ptx::registers_fresh(0);
    float St[tile_rows / 2], dPt[tile_rows / 2];
    ptx::wgmma_fence();  // the registers of S and dP have been used for other things
    issue_dots<type, S::steps>(St, shared.K[warpgroup], shared.Q[stage], fresh, [&] {
      if constexpr (config.statistics_by_product)
        issue_parts<type>(St, shared.statistics.weights, shared.statistics.parts[stage].lse, fresh);
    });
    issue_dots<type, S::steps_v>(dPt, shared.V[warpgroup], shared.dO[stage], fresh, [&] {
      if constexpr (config.statistics_by_product)
        issue_parts<type>(dPt, shared.statistics.weights, shared.statistics.parts[stage].delta, fresh);
    });

    // Under the products: what is known of the tile.
    const int thread = ThreeConsumer::thread(), lane = thread % 32;
    const bool is_flagged = shared.statistics.is_flagged(stage);
    const bool at_edge = edge || (!steady_state(step) && (step_at(step).edge >> warpgroup & 1) != 0);
    tile::Sequence sequence{};
    Step here{};
    int kv_begin = 0;
    unsigned nonfinite_lanes = 0;
    // Most tiles need no place: shared memory has enough to do.
    if (config.features.touches_scores() || at_edge) {
      sequence = fresh_sequence(task().sequence);
      here = step_at(step);
      kv_begin = task().kv_begin + warpgroup * tile_rows;
      // Row r of a warp's 16 keys was looked at by lanes 2 r and 2 r + 1.
      if constexpr (!S::separate_dq) nonfinite_lanes = shared.nonfinite_lanes[warpgroup][thread / 32];
    }
    const tile::Score<config.features> score(args, sequence, here.head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, here.head_idx);
    const Math math{score,
                    dropout,
                    score.unit_scale() * tile::log2_e,
                    here.q_begin,
                    kv_begin,
                    16 * (thread / 32) + lane / 4,
                    2 * (lane % 4),
                    at_edge,
                    {(nonfinite_lanes >> 2 * (lane / 4) & 3) != 0, (nonfinite_lanes >> 2 * (lane / 4) + 16 & 3) != 0}};
    typename Math::Marks marks;
    if constexpr (config.features.dropout) math.mark(marks);
    ptx::wgmma_wait<0>();  // S and dP are complete
    ptx::wgmma_pin(St);
    ptx::wgmma_pin(dPt);
    if (is_flagged) {
      const long long padded = step_at(step).padded;
      subtract_rest<type>(St, workspace<float>(args, Region::lse2) + padded, lane);
      subtract_rest<type>(dPt, workspace<float>(args, Region::delta) + padded, lane);
    }
    if constexpr (!config.features.dropout) math.mark(marks);
    math.operands(
        St, dPt, marks, [&](int i) { return shared.statistics.lse2_of(stage, i / 4, lane); },
        [&](int i) { return shared.statistics.delta_of(stage, i / 4, lane); }, P, dS);
    ptx::wgmma_pin(P);
    ptx::wgmma_pin(dS);
  }

  /// dQ is that of the step before, where this warpgroup owns it: dS of all the others is written by now.
  template <bool makes_dQ>
  __device__ __forceinline__ void run_step(unsigned step) {
    await_step(step);
    if (steady_state(step) ? sees_no_key : (step_at(step).hidden >> warpgroup & 1) != 0) {
      if constexpr (!S::separate_dq) send_dS({}), parts().signal_owner(stage);  // for the owner, who multiplies all keys
      if constexpr (makes_dQ) make_dQ(step - 1);
      parts().await_all_threads();  // no thread waits for the stage's phase any more
    } else {
      const int fresh = ptx::registers_fresh(0);
      typename Math::Packed P, dS;
      make_operands(step, P, dS);
      issue_rows<type, S::width_v>(dV, P, shared.dO[stage], fresh);
      if constexpr (!S::separate_dq) send_dS(dS);
      float dQ[S::width / 2];
      if constexpr (makes_dQ) parts().begin_dQ(dQ);
      issue_rows<type, S::width>(dK, dS, shared.Q[stage], fresh);
      if constexpr (!S::separate_dq) parts().signal_owner(stage);  // the products are issued before its fence waits
      if constexpr (makes_dQ) {
        ptx::wgmma_wait<1>();  // dV and dQ are done; dK may still run
        ptx::wgmma_pin(dQ);
        stage_dQ(dQ, step - 1);
      }
      ptx::wgmma_wait<0>();  // dV and dK are done
      ptx::wgmma_pin(dV);
      ptx::wgmma_pin(P);
      ptx::wgmma_pin(dK);
      ptx::wgmma_pin(dS);
      if constexpr (makes_dQ) parts().signal_sender(static_cast<int>(step - 1));
    }
    if (threadIdx.x % wg_threads == 0) ptx::mbarrier_arrive(shared.empty[stage]);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++work_tile_idx) {
      ptx::mbarrier_wait(shared.KV_full, work_tile_idx % 2);  // K and V have landed
      if (!work_tile().exists) return parts().stop_sender();
      if constexpr (!S::separate_dq) parts().zero_nonfinite_keys();
      zero(dK);
      zero(dV);
      const int first_key = task().kv_begin + warpgroup * tile_rows, seen = task().sequence.visible_kv - first_key;
      const bool nonfinite = !S::separate_dq && shared.nonfinite_lanes[warpgroup][thread() / 32] != 0;
      sees_no_key = ptx::shuffle(seen <= 0 ? 1 : 0, 0) != 0;
      edge = ptx::shuffle(seen < tile_rows || nonfinite ? 1 : 0, 0) != 0;
      first_step = ptx::shuffle(work_tile().first_step, 0);
      end_step = ptx::shuffle(work_tile().end_step, 0);
      const bool one_head = task().num_steps == task().tiles.end - task().tiles.begin;
      steady_from = ptx::shuffle(one_head ? first_step + diagonal_steps : end_step, 0);
#pragma unroll 1
      for (unsigned step = first_step; step != end_step; ++step) {
        if (step != first_step && owned_last()) {
          run_step<!S::separate_dq>(step);
        } else {
          run_step<false>(step);
        }
        if (++stage == S::stages) stage = 0, phase ^= 1;
      }
      if (first_step != end_step && owned_last()) {
        if constexpr (!S::separate_dq) make_dQ<true>(end_step - 1);
      } else {
        if (S::separate_dq && first_step == end_step) parts().await_all_threads();  // neither steps nor keys to clean
        parts().release_keys();
      }
      parts().finish_task(dK, dV);
    }
  }
};

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_three_warpgroups_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 three warpgroups">();
  using namespace backward_sm90;
  static_assert(Shape<config>::warpgroups == 3);
  run_block<config>(
      args, [&](SharedStorage<config>& shared, int warpgroup) { ThreeConsumer<config>{args, shared, warpgroup}.run(); });
}

}  // namespace flash_attention
