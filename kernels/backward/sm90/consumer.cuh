#pragma once

// The main loop of a consumer warpgroup of backward/sm90 (two warpgroups):
//
//     for each work tile:
//       for each step (query head, query tile):
//         S = K Q^T, dP = V dO^T                            begin_S, make_operands
//         P = 2^(S - lse2), dS = P (dP - delta)             make_operands (scores.cuh)
//         dV += P dO                                        make_operands
//         dK += dS Q                                        use_dS
//         every second step: dQ = dS K                      make_dQ (dq_exchange.cuh)
//       dK and dV to memory                                 epilogue.cuh

#include "backward/sm90/epilogue.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Consumer : Epilogue<config> {
  using Base = Epilogue<config>;
  using Base::args, Base::shared, Base::warpgroup, Base::thread, Base::type, Base::work_tile_idx;
  using Base::first_step, Base::end_step, Base::edge, Base::work_tile, Base::task, Base::fresh_thread;
  using Base::leads, Base::owner_of, Base::hand_over, Base::make_dQ, Base::release_keys, Base::await_all_threads;
  using typename Base::Math, typename Base::S;

  /// The steps of a task differ in what is seen of them.
  static constexpr bool uneven = config.features.window_left || config.features.window_right || config.features.mask ||
                                 S::next_sequence_rows || StepList<config>::present;

  /// Statistics are read under the products before them.
  static constexpr bool early_statistics = !S::serial_dP && !S::short_of_registers;

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

  using Tile = typename Math::Tile;
  struct Operands {  // P and dS of a step, as operands of products
    typename Math::Packed P, dS;
  };

  float dK[S::width / 2], dV[S::width_v / 2];
  typename Math::Bias bias;  // of the step whose S is on its way

  __device__ __forceinline__ void await_step(unsigned step) const {
    const PipelineState<S::stages> state(step);
    ptx::mbarrier_wait(shared.full[state.stage], state.phase);  // Q, dO and the statistics have landed
  }

  /// The step has been waited for; now S is on its way.
  __device__ __forceinline__ void begin_S(unsigned step, Tile& St) {
    const PipelineState<S::stages> state(step);
    if constexpr (S::next_sequence_rows) {
      const int used_rows = task().sequence.len_q - shared.step[step % steps_kept].q_begin;
      clear_next_sequence_rows<config>(shared.Q[state.stage], warpgroup, thread, used_rows);
      clear_next_sequence_rows<config>(shared.dO[state.stage], warpgroup, thread, used_rows);
    }
    ptx::wgmma_fence();  // the registers of S have been used for other things
    issue_dots<type, S::steps>(St, shared.K[warpgroup], shared.Q[state.stage], ptx::registers_fresh(0));
    this->load_bias(step, bias);
  }

  /// From S, which is on its way, to dS; then dV is on its way.
  __device__ __forceinline__ void make_operands(unsigned step, Tile& St, Operands& operands) {
    const PipelineState<S::stages> state(step);
    const Step& here = shared.step[step % steps_kept];
    const int fresh = ptx::registers_fresh(0), thread = fresh_thread(), lane = thread % 32;
    auto& [P, dS] = operands;
    Tile dPt;
    const auto begin_dP = [&] {
      ptx::wgmma_fence();  // the registers of dP have been used for other things
      issue_dots<type, S::steps_v>(dPt, shared.V[warpgroup], shared.dO[state.stage], fresh);
    };
    const auto pair_of = [&](const float(&values)[tile_rows], int group) {
      return *reinterpret_cast<const typename Math::Pair*>(&values[8 * group + 2 * (lane % 4)]);
    };
    // Under the products: what is known of the tile.
    const int kv_begin = task().kv_begin + warpgroup * tile_rows;
    const tile::Sequence sequence = fresh_sequence(task().sequence);
    const tile::Score<config.features> score(args, sequence, here.head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, here.head_idx);
    // Row r of a warp's 16 keys was looked at by lanes 2 r and 2 r + 1.
    const unsigned nonfinite_lanes = S::separate_dq || !edge ? 0 : shared.nonfinite_lanes[warpgroup][thread / 32];
    const Math math{score,
                    dropout,
                    score.unit_scale() * tile::log2_e,
                    here.q_begin,
                    kv_begin,
                    16 * (thread / 32) + lane / 4,
                    2 * (lane % 4),
                    edge || (uneven && (here.edge >> warpgroup & 1) != 0),
                    {(nonfinite_lanes >> 2 * (lane / 4) & 3) != 0, (nonfinite_lanes >> 2 * (lane / 4) + 16 & 3) != 0},
                    bias};
    typename Math::Marks marks;
    typename Math::Pair lse2[tile_rows / 8], delta[tile_rows / 8];
    if constexpr (early_statistics) {
#pragma unroll
      for (int group = 0; group < tile_rows / 8; ++group) lse2[group] = pair_of(shared.lse2[state.stage], group);
    }
    if constexpr (!S::serial_dP) begin_dP();
    math.mark(marks);
    ptx::wgmma_wait<S::serial_dP ? 0 : 1>();  // S is there; dP may still run
    ptx::wgmma_pin(St);
    math.probabilities(
        St, marks, [&](int i) { return early_statistics ? lse2[i / 4] : pair_of(shared.lse2[state.stage], i / 4); },
        [&](int i, float p, float q) { P[i / 8][i / 2 % 4] = ptx::pack<type>(p, q); });
    ptx::wgmma_pin(P);
    if constexpr (S::serial_dP) begin_dP();
    issue_rows<type, S::width_v>(dV, P, shared.dO[state.stage], fresh);
    if constexpr (early_statistics) {
#pragma unroll
      for (int group = 0; group < tile_rows / 8; ++group) delta[group] = pair_of(shared.delta[state.stage], group);
    }

    ptx::wgmma_wait<S::serial_dP ? 0 : 1>();  // dP is there; dV may still run
    ptx::wgmma_pin(dPt);
    if constexpr (S::serial_dP) ptx::wgmma_pin(P);
    math.gradients(St, dPt, marks,
                   [&](int i) { return early_statistics ? delta[i / 4] : pair_of(shared.delta[state.stage], i / 4); });
    Math::pack(dPt, dS);
    ptx::wgmma_pin(dS);
  }

  template <int pending>
  __device__ __forceinline__ void await_dV(Operands& operands) {
    ptx::wgmma_wait<pending>(), ptx::wgmma_pin(dV);
    ptx::wgmma_pin(operands.P);
  }

  /// dK of a step, and its dS to the owner, who may have it already. begin_next() is called when dV is done and dK runs.
  template <bool handed_over = false, bool begins = false, typename BeginNext = Nothing>
  __device__ __forceinline__ void use_dS(unsigned step, Operands& operands, BeginNext begin_next = {}) {
    const PipelineState<S::stages> state(step);
    issue_rows<type, S::width>(dK, operands.dS, shared.Q[state.stage], ptx::registers_fresh(0));
    if constexpr (!S::separate_dq && !handed_over)
      hand_over(operands.dS, step);  // the product is issued before its fence waits
    if constexpr (begins) {
      await_dV<1>(operands);
      begin_next();
      ptx::wgmma_wait<1>();  // dK is done
    } else {
      await_dV<0>(operands);  // and dK
    }
    ptx::wgmma_pin(dK);
    ptx::wgmma_pin(operands.dS);
    if (leads()) ptx::mbarrier_arrive(shared.empty[state.stage]);
  }

  /// A step of which this warpgroup sees nothing.
  __device__ __forceinline__ void pass(unsigned step) const {
    if constexpr (!S::separate_dq) hand_over({}, step);  // for the owner, who multiplies all keys
    await_all_threads();                                 // no thread waits for the stage's phase any more
    if (leads()) ptx::mbarrier_arrive(shared.empty[PipelineState<S::stages>(step).stage]);
  }
  __device__ __forceinline__ bool hidden(unsigned step) const {
    return (shared.step[step % steps_kept].hidden >> warpgroup & 1) != 0;
  }

  /// A step by itself.
  template <bool may_pass>
  __device__ __forceinline__ void walk_step(unsigned step) {
    await_step(step);
    if (may_pass && hidden(step)) return pass(step);
    Tile St;
    Operands operands;
    begin_S(step, St);
    make_operands(step, St, operands);
    use_dS(step, operands);
  }

  /// All steps from one on that this warpgroup owns, and with it each second one after it. The loop's edge lies where the
  /// fewest numbers live and no product runs: dS of a step has been handed over, dK has not begun.
  __device__ __forceinline__ void walk_pairs(unsigned step) {
    if (step == end_step) return;
    Operands operands;
    {
      Tile St;
      await_step(step);
      begin_S(step, St);
      make_operands(step, St, operands);
      hand_over(operands.dS, step);
      await_dV<0>(operands);
    }
    const auto second_step = [&] {
      Tile St;
      use_dS<true, true>(step, operands, [&] { await_step(step + 1), begin_S(step + 1, St); });
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
      hand_over(operands.dS, step + 2);
      await_dV<0>(operands);
    }
    if (step + 1 != end_step) {
      second_step();
      make_dQ(step);
    } else {
      use_dS<true>(step, operands);
    }
  }

  __device__ __forceinline__ void run_task() {
    zero(dK), zero(dV);
    if constexpr (!S::separate_dq) this->zero_nonfinite_keys();
    this->begin_task();
    const auto owns = [&](unsigned step) { return !S::separate_dq && owner_of(step) == warpgroup; };
    unsigned step = first_step;
    if constexpr (S::software_pipelined) {
      if (step != end_step && owns(step - 1)) walk_step<S::skips_first_step>(step++);
      walk_pairs(step);
    } else {
#pragma unroll 1
      for (; step != end_step; ++step) {
        walk_step<true>(step);
        if constexpr (!S::separate_dq) {
          if (step != first_step && owns(step - 1)) make_dQ(step - 1);  // a step later: dS of the others is there by now
        }
      }
    }
    if (end_step != first_step && owns(end_step - 1)) {
      if constexpr (!S::separate_dq) this->template make_dQ<true>(end_step - 1);
    } else {
      if (S::separate_dq && end_step == first_step) await_all_threads();  // neither steps nor keys to clean
      release_keys();
    }
    this->finish_task(dK, dV);
  }
};

}  // namespace flash_attention::backward_sm90
