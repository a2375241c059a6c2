#pragma once

// The main loop of a consumer warpgroup of backward/sm90 (two warpgroups):
//
//     for each work tile:
//       for each step (query head, query tile):
//         P, dS, dV += P dO, dK += dS Q                     steps.cuh
//         every second step: dQ = dS K                      make_dQ (dq_exchange.cuh)
//       dK and dV to memory                                 epilogue.cuh

#include "backward/sm90/steps.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Consumer : Steps<config> {
  using Base = Steps<config>;
  using Base::await_step, Base::begin_S, Base::make_operands, Base::await_dV, Base::use_dS, Base::hidden, Base::pass;
  using Base::dK, Base::dV, Base::shared, Base::warpgroup, Base::type, Base::work_tile_idx, Base::first_step;
  using Base::end_step, Base::work_tile, Base::owner_of, Base::hand_over, Base::make_dQ, Base::release_keys, Base::leads;
  using typename Base::Operands, typename Base::S, typename Base::Tile;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++work_tile_idx) {
      if constexpr (S::direct_dq) this->prepare_queries(work_tile_idx);
      ptx::mbarrier_wait(shared.KV_full, work_tile_idx % 2);  // K and V have landed
      if (!work_tile().exists) break;
      run_task();
    }
    this->dismiss_sender();
    if constexpr (S::direct_dq && Base::may_hide) this->repair_keys();
  }

  /// A step by itself.
  __device__ __forceinline__ void walk_step(unsigned step) {
    await_step(step);
    if (hidden(step)) return pass(step);
    Tile St;
    Operands operands;
    begin_S(step, St);
    make_operands(step, St, operands);
    use_dS(step, operands);
  }

  /// All steps, in pairs: one that this warpgroup owns, and the one after it. The loop's edge lies where the fewest numbers
  /// live and no product runs: dS of an owned step has been handed over, dK has not begun. What comes before the first such
  /// step goes the same way: the code of a step is long to compile, and to load.
  __device__ __forceinline__ void walk_pairs() {
    if (first_step == end_step) return;
    unsigned step = first_step;  // the one after the owned one
    bool pending = false;        // there is an owned one
    Operands operands{};
#pragma unroll 1
    for (;;) {
      step = ptx::shuffle(step, 0);  // known to be the same in a warp
      if (S::skips_first_step && !pending && owner_of(step) != warpgroup) {
        await_step(step);
        if (hidden(step)) {
          pass(step);
          if (++step == end_step) return;
          continue;
        }
      }
      Tile St;
      begin_second(step, pending, St, operands);
      make_operands(step, St, operands);
      if (!pending) {
        if (owner_of(step) == warpgroup) {
          hand_over(operands.dS, step);
          await_dV(operands);
          pending = true;
        } else {
          use_dS(step, operands);
          operands = {};
        }
        if (++step == end_step) break;
        continue;
      }
      use_dS(step, operands);
      if (step + 1 == end_step) return make_dQ(step - 1);
      Tile next_St;  // another array: a product that does not accumulate counts as one that reads
      const auto begin_next = [&] { await_step(step + 1), begin_S(step + 1, next_St); };
      if constexpr (S::skips_first_step) {  // while dQ is staged; without a mask that loses: warpgroups stay in step
        make_dQ(step - 1, begin_next);
      } else {
        make_dQ(step - 1);
        begin_next();
      }
      make_operands(step + 1, next_St, operands);
      hand_over(operands.dS, step + 1);
      await_dV(operands);
      step += 2;
      if (step == end_step) break;
    }
    if (pending) this->template use_dS<true>(step - 1, operands);
  }

  /// dK of the owned step before, if there is one, and S of this one under it.
  __device__ __forceinline__ void begin_second(unsigned step, bool pending, Tile& St, Operands& operands) {
    const int stage = PipelineState<S::stages>(step - 1).stage;
    if constexpr (S::skips_first_step && !config.key_sums) {
      if (pending) issue_rows<type, S::width>(dK, operands.dS, shared.Q[stage], ptx::registers_fresh(0));
    } else {  // no register for the branch: without such a step dK += 0 K, which is finite (zero_nonfinite_keys)
      const void* const rows = pending ? static_cast<const void*>(shared.Q[stage]) : shared.K[warpgroup];
      issue_rows<type, S::width>(dK, operands.dS, rows, ptx::registers_fresh(0));
    }
    await_step(step);
    begin_S(step, St);
    ptx::wgmma_wait<1>();  // dK is done
    ptx::wgmma_pin(dK);
    ptx::wgmma_pin(operands.dS);
    if (pending && leads()) ptx::mbarrier_arrive(shared.empty[stage]);
  }

  __device__ __forceinline__ void run_task() {
    zero(dK), zero(dV);
    if constexpr (!S::separate_dq) this->zero_nonfinite_keys();
    this->begin_task();
    const auto owns = [&](unsigned step) { return !S::separate_dq && owner_of(step) == warpgroup; };
    if constexpr (S::software_pipelined) {
      walk_pairs();
    } else {
#pragma unroll 1
      for (unsigned step = first_step; step != end_step; ++step) {
        walk_step(step);
        if constexpr (!S::separate_dq) {
          if (step != first_step && owns(step - 1)) make_dQ(step - 1);  // a step later: dS of the others is there by now
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
