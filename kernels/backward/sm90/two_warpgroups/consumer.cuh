#pragma once

// The main loop of a consumer warpgroup of backward/sm90 (two warpgroups):
//
//     for each work tile:
//       for each step (query head, query tile):
//         P, dS, dV += P dO, dK += dS Q                     steps.cuh
//         every second step: dQ = dS K                      make_dQ (dq_exchange.cuh)
//       dK and dV to memory                                 store_dkv.cuh
//
// S::software_pipelined: the products of a step are issued under the softmax of its neighbour. Two steps an iteration, a,
// whose dQ this warpgroup makes, and b = a + 1 (run_step_pairs):
//
//     before the loop:   P(a), dS(a);  dV += P(a) dO;  dS(a) sent
//     for each pair:     issue dK += dS(a) Q;  issue S(b);  P(b), dS(b);  dV += P(b) dO;  dK += dS(b) Q;  dS(b) sent
//                        dQ(a) = dS(a) K, staged while S(a + 2) runs
//                        P(a + 2), dS(a + 2);  dV += P(a + 2) dO;  dS(a + 2) sent

#include "backward/sm90/two_warpgroups/steps.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Consumer : Steps<config> {
  using Base = Steps<config>;
  using Base::await_step, Base::begin_S, Base::make_operands, Base::use_dS, Base::hidden, Base::skip_step;
  using Base::dK, Base::dV, Base::shared, Base::warpgroup, Base::work_tile_idx, Base::first_step;
  using Base::end_step, Base::work_tile, Base::owner_of, Base::send_dS, Base::make_dQ, Base::release_keys;
  using typename Base::Operands, typename Base::S, typename Base::Tile;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++work_tile_idx) {
      if constexpr (S::direct_dq) this->prepare_queries(work_tile_idx);
      ptx::mbarrier_wait(shared.KV_full, work_tile_idx % 2);  // K and V have landed
      if (!work_tile().exists) break;
      run_task();
    }
    this->stop_sender();
    if constexpr (S::direct_dq && Base::may_hide) this->repair_keys();
  }

  /// A step by itself.
  template <bool may_skip>
  __device__ __forceinline__ void run_step(unsigned step) {
    await_step(step);
    if (may_skip && hidden(step)) return skip_step(step);
    Tile St;
    Operands operands;
    begin_S(step, St);
    make_operands(step, St, operands);
    use_dS(step, operands);
  }

  /// All steps from one on that this warpgroup owns, and with it each second one after it. The loop's edge is where the
  /// fewest numbers live and no product runs: dS of a step has been sent, dK has not begun.
  __device__ __forceinline__ void run_step_pairs(unsigned step) {
    if (step == end_step) return;
    Operands operands;
    {
      Tile St;
      await_step(step);
      begin_S(step, St);
      make_operands(step, St, operands);
      send_dS(operands.dS, step);
      this->template await_dV<0>(operands);
    }
    const auto second_step = [&] {
      Tile St;
      this->template use_dS<true, true>(step, operands, [&] { await_step(step + 1), begin_S(step + 1, St); });
      Operands operands;
      make_operands(step + 1, St, operands);
      use_dS(step + 1, operands);
    };
#pragma unroll 1
    for (; step + 2 < end_step; step += 2) {
      second_step();
      Tile St;
      const auto begin_next = [&] { await_step(step + 2), begin_S(step + 2, St); };
      if constexpr (S::skips_first_step) {  // while dQ is staged; without a mask that loses: warpgroups stay in step
        make_dQ(step, begin_next);
      } else {
        make_dQ(step);
        begin_next();
      }
      make_operands(step + 2, St, operands);
      send_dS(operands.dS, step + 2);
      this->template await_dV<0>(operands);
    }
    if (step + 1 != end_step) {
      second_step();
      make_dQ(step);
    } else {
      this->template use_dS<true>(step, operands);
    }
  }

  __device__ __forceinline__ void run_task() {
    zero(dK), zero(dV);
    if constexpr (!S::separate_dq) this->zero_nonfinite_keys();
    this->begin_task();
    const auto owns = [&](unsigned step) { return !S::separate_dq && owner_of(step) == warpgroup; };
    unsigned step = first_step;
    if constexpr (S::software_pipelined) {
      if (step != end_step && owns(step - 1)) run_step<S::skips_first_step>(step++);
      run_step_pairs(step);
    } else {
#pragma unroll 1
      for (; step != end_step; ++step) {
        run_step<true>(step);
        if constexpr (!S::separate_dq) {
          if (step != first_step && owns(step - 1)) make_dQ(step - 1);  // a step later: dS of the others is written by now
        }
      }
    }
    if (end_step != first_step && owns(end_step - 1)) {
      if constexpr (!S::separate_dq) this->template make_dQ<true>(end_step - 1);
    } else {
      if (S::separate_dq && end_step == first_step) this->await_all_threads();  // neither steps nor keys to clean
      release_keys();
    }
    this->finish_task(dK, dV);
  }
};

}  // namespace flash_attention::backward_sm90
