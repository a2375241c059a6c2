#pragma once

// A step (query head, query tile) of a consumer warpgroup of backward/sm90 (two warpgroups):
//
//     S = K Q^T, dP = V dO^T                            begin_S, make_operands
//     P = 2^(S - lse2), dS = P (dP - delta)             make_operands (scores.cuh)
//     dV += P dO                                        make_operands
//     dK += dS Q                                        use_dS

#include "backward/sm90/parts/store_dkv.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct Steps : Epilogue<config> {
  using Base = Epilogue<config>;
  using Base::args, Base::shared, Base::warpgroup, Base::thread, Base::type, Base::edge, Base::task;
  using Base::leads, Base::send_dS, Base::await_all_threads, Base::fresh_thread;
  using typename Base::Math, typename Base::S;

  /// Some steps may be edges: tiles of which only a part is visible.
  static constexpr bool has_edges = config.features.window_left || config.features.window_right || config.features.mask ||
                                    S::next_sequence_rows || StepList<config>::present;

  /// Statistics are read under the products before them.
  static constexpr bool by_product = config.statistics_by_product;
  static constexpr bool early_statistics = !config.loop.late_statistics && !by_product;

  using Tile = typename Math::Tile;
  struct Operands {  // P and dS of a step, as operands of products
    typename Math::Packed P, dS;
  };

  float dK[S::width / 2], dV[S::width_v / 2];
  typename Math::Bias bias;  // of the step whose S is in flight

  __device__ __forceinline__ void await_step(unsigned step) const {
    const PipelineState<S::stages> state(step);
    ptx::mbarrier_wait(shared.full[state.stage], state.phase);  // Q, dO and the statistics have landed
  }

  /// The step has been waited for; now S is issued.
  __device__ __forceinline__ void begin_S(unsigned step, Tile& St) {
    const PipelineState<S::stages> state(step);
    if constexpr (S::next_sequence_rows) {
      const int used_rows = task().sequence.len_q - shared.step[step % steps_kept].q_begin;
      clear_next_sequence_rows<config>(shared.Q[state.stage], warpgroup, thread, used_rows);
      clear_next_sequence_rows<config>(shared.dO[state.stage], warpgroup, thread, used_rows);
    }
    ptx::wgmma_fence();  // the registers of S have been used for other things
    const int fresh = ptx::registers_fresh(0);
    issue_dots<type, S::steps>(St, shared.K[warpgroup], shared.Q[state.stage], fresh, [&] {
      if constexpr (by_product)
        issue_parts<type>(St, shared.statistics.weights, shared.statistics.parts[state.stage].lse, fresh);
    });
    if constexpr (!config.bias_boxes) this->load_bias(step, bias);
  }

  /// From S, which is in flight, to dS; then dV is in flight.
  __device__ __forceinline__ void make_operands(unsigned step, Tile& St, Operands& operands) {
    const PipelineState<S::stages> state(step);
    const Step& here = shared.step[step % steps_kept];
    const int fresh = ptx::registers_fresh(0), thread = fresh_thread(), lane = thread % 32;
    auto& [P, dS] = operands;
    Tile dPt;
    const auto begin_dP = [&] {
      ptx::wgmma_fence();  // the registers of dP have been used for other things
      issue_dots<type, S::steps_v>(dPt, shared.V[warpgroup], shared.dO[state.stage], fresh, [&] {
        if constexpr (by_product)
          issue_parts<type>(dPt, shared.statistics.weights, shared.statistics.parts[state.stage].delta, fresh);
      });
    };
    const auto lse2_of = [&](int group) { return shared.statistics.lse2_of(state.stage, group, lane); };
    const auto delta_of = [&](int group) { return shared.statistics.delta_of(state.stage, group, lane); };
    const bool is_flagged = shared.statistics.is_flagged(state.stage);
    // Under the products: what is known of the tile. Without a mask most need no place.
    const bool needs_place = has_edges || config.features.touches_scores() || edge;
    const int kv_begin = needs_place ? task().kv_begin + warpgroup * tile_rows : 0,
              q_begin = needs_place ? here.q_begin : 0;
    const int head_idx = needs_place ? here.head_idx : 0;
    const tile::Sequence sequence = needs_place ? fresh_sequence(task().sequence) : tile::Sequence{};
    const tile::Score<config.features> score(args, sequence, head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    // Row r of a warp's 16 keys was looked at by lanes 2 r and 2 r + 1.
    const unsigned nonfinite_lanes = S::separate_dq || !edge ? 0 : shared.nonfinite_lanes[warpgroup][thread / 32];
    const Math math{score,
                    dropout,
                    score.unit_scale() * tile::log2_e,
                    q_begin,
                    kv_begin,
                    16 * (thread / 32) + lane / 4,
                    2 * (lane % 4),
                    edge || (has_edges && (here.edge >> warpgroup & 1) != 0),
                    {(nonfinite_lanes >> 2 * (lane / 4) & 3) != 0, (nonfinite_lanes >> 2 * (lane / 4) + 16 & 3) != 0},
                    bias};
    typename Math::Marks marks;
    typename Math::Pair lse2[tile_rows / 8], delta[tile_rows / 8];
    if constexpr (early_statistics) {
#pragma unroll
      for (int group = 0; group < tile_rows / 8; ++group) lse2[group] = lse2_of(group);
    }
    if constexpr (!S::serial_dP) begin_dP();
    if constexpr (config.bias_boxes) this->load_bias(step, math.bias);
    release_biases<config>(shared, state.stage);
    const unsigned* words = nullptr;
    if constexpr (config.step_words) {
      if ((here.words >> warpgroup & 1) != 0)
        words = mask::step_words(args, sequence.batch_idx, head_idx, q_begin, kv_begin);
    }
    math.mark(marks, words);
    if constexpr (config.step_words && S::software_pipelined) {  // it has no words, and is not skipped
      if ((here.hidden >> warpgroup & 1) != 0) marks.hidden[0] = 0xffffffffu;
    }
    if (!config.step_words && warpgroup == 0)
      Math::prefetch_mask(score, here.q_begin + 2 * tile_rows, task().kv_begin, thread);
    ptx::wgmma_wait<S::serial_dP ? 0 : 1>();  // S is complete; dP may still run
    ptx::wgmma_pin(St);
    if (is_flagged) subtract_rest<type>(St, workspace<float>(args, Region::lse2) + here.padded, lane);
    math.probabilities(
        St, marks, [&](int i) { return early_statistics ? lse2[i / 4] : lse2_of(i / 4); },
        [&](int i, float p, float q) { P[i / 8][i / 2 % 4] = ptx::pack<type>(p, q); });
    ptx::wgmma_pin(P);
    if constexpr (S::serial_dP) begin_dP();
    issue_rows<type, S::width_v>(dV, P, shared.dO[state.stage], fresh);
    if constexpr (early_statistics) {
#pragma unroll
      for (int group = 0; group < tile_rows / 8; ++group) delta[group] = delta_of(group);
    }

    ptx::wgmma_wait<S::serial_dP ? 0 : 1>();  // dP is complete; dV may still run
    ptx::wgmma_pin(dPt);
    if constexpr (S::serial_dP) ptx::wgmma_pin(P);
    if (is_flagged) subtract_rest<type>(dPt, workspace<float>(args, Region::delta) + here.padded, lane);
    math.gradients(St, dPt, marks, [&](int i) { return early_statistics ? delta[i / 4] : delta_of(i / 4); });
    Math::pack(dPt, dS);
    ptx::wgmma_pin(dS);
  }

  template <int pending>
  __device__ __forceinline__ void await_dV(Operands& operands) {
    ptx::wgmma_wait<pending>(), ptx::wgmma_pin(dV);
    ptx::wgmma_pin(operands.P);
  }

  /// dK of a step, and its dS to the owner, who may have it already. begin_next() is called when dV is done and dK runs.
  template <bool dS_sent = false, bool begins = false, typename BeginNext = Nothing>
  __device__ __forceinline__ void use_dS(unsigned step, Operands& operands, BeginNext begin_next = {}) {
    const PipelineState<S::stages> state(step);
    issue_rows<type, S::width>(dK, operands.dS, shared.Q[state.stage], ptx::registers_fresh(0));
    if constexpr (!S::separate_dq && !dS_sent) send_dS(operands.dS, step);  // the product is issued before its fence waits
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
  __device__ __forceinline__ void skip_step(unsigned step) const {
    if constexpr (!S::separate_dq) send_dS({}, step);  // for the owner, who multiplies all keys
    await_all_threads();                               // no thread waits for the stage's phase any more
    const int stage = PipelineState<S::stages>(step).stage;
    release_biases<config>(shared, stage);
    if (leads()) ptx::mbarrier_arrive(shared.empty[stage]);
  }
  __device__ __forceinline__ bool hidden(unsigned step) const {
    return (shared.step[step % steps_kept].hidden >> warpgroup & 1) != 0;
  }
};

}  // namespace flash_attention::backward_sm90
