#pragma once

// Attention backward for sm_90 (Hopper), head dimensions up to 128. A block computes dK and dV of a tile of keys, and
// adds the tile's share of dQ.
//
// A block holds K and V of 128 keys of one key head, 64 for each of its two warpgroups. It loops over the query tiles
// (64 rows) of every query head of the group. In each step, every warpgroup computes:
//
//     S^T = K Q^T          dP^T = V dO^T                          64 keys x 64 queries, in registers
//     P^T = 2^(S^T - lse2)                    dV += P^T dO        P and dS are the left operands, straight from registers
//     dS^T = P^T (dP^T - delta)               dK += dS^T Q
//     dS to shared memory, transposed
//     the owner of the step:                  dQ = dS K           over all keys of the block; added to fp32 sums in memory
//
// Words: a task is a tile of keys with its query heads; a step is one query tile of one of these heads. The owner of a
// step is the warpgroup that computes its dQ; the warpgroups alternate. The owner's sender, a warp of the loading
// warpgroup, adds dQ to the sums in memory.
//
// Warps: warpgroup 0 gives up its registers; its warp 0 loads by TMA (parts/producer.cuh), warps 1 and 2 are the senders
// (parts/dq_exchange.cuh). Warpgroups 1 and 2 compute: this file.
//
// Registers of a thread that computes: 240, or 232 if masks choose the steps. At head dimension 128, dK and dV take 128
// of them, S and dP 32 each, P and dS 16 each. Few are left, so with a score option products and softmax may no longer
// overlap: Overlap says which loop runs.
//
// Shared memory at head dimension 128 and two stages, in KiB: K and V 64, Q and dO 64, dS 32, dQ on its way to memory 64.
//
// If no other task has the same key head, the block writes its dK and dV. If the query heads of a group are split
// between tasks, dK and dV are summed in memory, too (key_sums). DqMode says how dQ is summed: in any order, in a fixed
// order (parts/ordered_sums.cuh), by a second kernel (separate_dq/kernel.cuh), or not at all if one tile has all keys
// (direct).
//
// Read from the end of the file: run_tasks, run_task, the loop (run_step_pairs or run_single_steps), the parts of a
// step.
//
// prepare.cuh is launched before this kernel, repair.cuh after it. Other structures of the same loop:
// three_warpgroups/kernel.cuh (192 keys), wide/kernel.cuh (head dimensions to 256), columns/kernel.cuh (wider heads).

#include "backward/sm90/parts/dq_exchange.cuh"
#include "backward/sm90/parts/nonfinite_keys.cuh"
#include "backward/sm90/parts/store_dkv.cuh"
#include "ptx/launch.cuh"
#include "ptx/path.cuh"

namespace flash_attention {
namespace backward_sm90 {

/// The gradients of the warpgroup's 64 keys, and the biases of a step. The biases are here and not beside their S,
/// because S must be a variable by itself: as part of a struct it makes the compiler spill.
template <BackwardConfig config>
struct Sums {
  float dK[Shape<config>::width / 2], dV[Shape<config>::width_v / 2];
  typename KeyScores<config>::Bias bias;  // of the step whose S is in flight
};

/// A warpgroup and its sums. They are one object: with two variables the compiler takes the loop over tasks apart, and
/// spills.
template <BackwardConfig config>
struct Consumer {
  Warpgroup<config> wg;
  Sums<config> sums;
};

/// P and dS of a step, as operands of products.
template <BackwardConfig config>
struct Operands {
  typename KeyScores<config>::Packed P, dS;
};

/// Whether some steps may be edges: tiles of which only a part is visible.
template <BackwardConfig config>
constexpr bool has_edges = config.features.window_left || config.features.window_right || config.features.mask ||
                           Shape<config>::next_sequence_rows || StepList<config>::present;

// -- a step ---------------------------------------------------------------------------------------------------------------

template <BackwardConfig config>
__device__ __forceinline__ void await_step(const Warpgroup<config>& wg, unsigned step) {
  const PipelineState<Shape<config>::stages> state(step);
  ptx::mbarrier_wait(wg.shared.full[state.stage], state.phase);  // Q, dO and the statistics have landed
}

/// Loads the biases of a step, and prefetches those of a later step to L2. If TMA loads the biases, they have landed
/// with the stage.
template <BackwardConfig config>
__device__ __forceinline__ void load_bias(const Warpgroup<config>& wg, unsigned step,
                                          typename KeyScores<config>::Bias& bias) {
  using Math = KeyScores<config>;
  if constexpr (config.bias_boxes) {
    if (has_bias_boxes(wg.args)) {
      const int stage = PipelineState<Shape<config>::stages>(step).stage;
      return Math::read_bias(bias, wg.shared.biases[stage][wg.index], fresh_thread());
    }
  }
  if constexpr (Math::Bias::present) {
    const Step& here = wg.step(step);
    const tile::Score<config.features> score(wg.args, fresh_sequence(wg.task().sequence), here.head_idx);
    const int kv_begin = wg.task().kv_begin + wg.index * tile_rows;
    bias = Math::load_bias(score, here.q_begin, kv_begin, fresh_thread());
    Math::Bias::template prefetch<tile_rows, tile_rows>(score, here.q_begin + 3 * tile_rows, kv_begin, fresh_thread());
    if constexpr (config.bias_boxes) bias.transpose();
  }
}

/// Issues S of a step, whose Q has landed.
template <BackwardConfig config>
__device__ __forceinline__ void issue_S(const Warpgroup<config>& wg, unsigned step, typename KeyScores<config>::Tile& St,
                                        typename KeyScores<config>::Bias& bias) {
  using S = Shape<config>;
  auto& shared = wg.shared;
  const PipelineState<S::stages> state(step);
  if constexpr (S::next_sequence_rows) {
    const int used_rows = wg.task().sequence.len_q - wg.step(step).q_begin;
    clear_next_sequence_rows<config>(shared.Q[state.stage], wg.index, wg.thread, used_rows);
    clear_next_sequence_rows<config>(shared.dO[state.stage], wg.index, wg.thread, used_rows);
  }
  ptx::wgmma_fence();  // other instructions have used the registers of S
  const int fresh = ptx::hide_from_compiler(0);
  issue_dots<S::type, S::steps>(St, shared.K[wg.index], shared.Q[state.stage], fresh, [&] {
    if constexpr (config.statistics_by_product)
      issue_parts<S::type>(St, shared.statistics.weights, shared.statistics.parts[state.stage].lse, fresh);
  });
  if constexpr (!config.bias_boxes) load_bias(wg, step, bias);
}

/// Computes P and dS of a step whose S is in flight. dV += P dO is left in flight.
template <BackwardConfig config>
__device__ __forceinline__ void compute_operands(const Warpgroup<config>& wg, unsigned step,
                                                 typename KeyScores<config>::Tile& St, Operands<config>& operands,
                                                 Sums<config>& sums) {
  using S = Shape<config>;
  using Math = KeyScores<config>;
  const AttentionArgs& args = wg.args;
  auto& shared = wg.shared;
  const PipelineState<S::stages> state(step);
  const Step& here = wg.step(step);
  const int fresh = ptx::hide_from_compiler(0), thread = fresh_thread(), lane = thread % 32;
  auto& [P, dS] = operands;
  typename Math::Tile dPt;
  const auto issue_dP = [&] {
    ptx::wgmma_fence();  // other instructions have used the registers of dP
    issue_dots<S::type, S::steps_v>(dPt, shared.V[wg.index], shared.dO[state.stage], fresh, [&] {
      if constexpr (config.statistics_by_product)
        issue_parts<S::type>(dPt, shared.statistics.weights, shared.statistics.parts[state.stage].delta, fresh);
    });
  };
  constexpr bool serial_dP = config.loop.overlap == Overlap::serial_dP;
  // If there are enough registers, statistics are loaded under the products before them.
  constexpr bool early_statistics = !config.loop.late_statistics && !config.statistics_by_product;
  const auto lse2_of = [&](int group) { return shared.statistics.lse2_of(state.stage, group, lane); };
  const auto delta_of = [&](int group) { return shared.statistics.delta_of(state.stage, group, lane); };
  const bool is_flagged = shared.statistics.is_flagged(state.stage);

  // Under the product: the place of the tile, and which part of it is hidden. Without a mask most tiles need no place.
  const bool needs_place = has_edges<config> || config.features.touches_scores() || wg.edge;
  const int kv_begin = needs_place ? wg.task().kv_begin + wg.index * tile_rows : 0,
            q_begin = needs_place ? here.q_begin : 0;
  const int head_idx = needs_place ? here.head_idx : 0;
  const tile::Sequence sequence = needs_place ? fresh_sequence(wg.task().sequence) : tile::Sequence{};
  const tile::Score<config.features> score(args, sequence, head_idx);
  const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
  const unsigned nonfinite_lanes = S::separate_dq || !wg.edge ? 0 : shared.nonfinite_lanes[wg.index][thread / 32];
  Math math = Math::of_thread(score, dropout, q_begin, kv_begin, thread);
  math.edge = wg.edge || (has_edges<config> && (here.edge >> wg.index & 1) != 0);
  math.take_nonfinite_rows(nonfinite_lanes, lane);
  math.bias = sums.bias;
  typename Math::Marks marks;
  typename Math::Pair lse2[tile_rows / 8], delta[tile_rows / 8];
  if constexpr (early_statistics) {
#pragma unroll
    for (int group = 0; group < tile_rows / 8; ++group) lse2[group] = lse2_of(group);
  }
  if constexpr (!serial_dP) issue_dP();
  if constexpr (config.bias_boxes) load_bias(wg, step, math.bias);
  release_biases<config>(shared, state.stage);
  const unsigned* words = nullptr;
  if constexpr (config.mask_bits) {
    if ((here.words >> wg.index & 1) != 0) words = mask::mask_bits(args, sequence.batch_idx, head_idx, q_begin, kv_begin);
  }
  math.mark(marks, words);
  // a hidden step has no words, and pairs do not skip it
  if constexpr (config.mask_bits && config.loop.overlap == Overlap::pairs) {
    if ((here.hidden >> wg.index & 1) != 0) marks.hidden[0] = 0xffffffffu;
  }
  if (!config.mask_bits && wg.index == 0)
    Math::prefetch_mask(score.sight, here.q_begin + 2 * tile_rows, wg.task().kv_begin, thread);

  ptx::wgmma_wait<serial_dP ? 0 : 1>();  // S is complete; dP may still run
  ptx::wgmma_pin(St);
  if (is_flagged) subtract_rest<S::type>(St, workspace<float>(args, Region::lse2) + here.padded, lane);
  math.probabilities(
      St, marks, [&](int i) { return early_statistics ? lse2[i / 4] : lse2_of(i / 4); },
      [&](int i, float p, float q) { P[i / 8][i / 2 % 4] = ptx::pack<S::type>(p, q); });
  ptx::wgmma_pin(P);
  if constexpr (serial_dP) issue_dP();
  issue_rows<S::type, S::width_v>(sums.dV, P, shared.dO[state.stage], fresh);
  if constexpr (early_statistics) {
#pragma unroll
    for (int group = 0; group < tile_rows / 8; ++group) delta[group] = delta_of(group);
  }

  ptx::wgmma_wait<serial_dP ? 0 : 1>();  // dP is complete; dV may still run
  ptx::wgmma_pin(dPt);
  if constexpr (serial_dP) ptx::wgmma_pin(P);
  if (is_flagged) subtract_rest<S::type>(dPt, workspace<float>(args, Region::delta) + here.padded, lane);
  math.gradients(St, dPt, marks, [&](int i) { return early_statistics ? delta[i / 4] : delta_of(i / 4); });
  Math::pack(dPt, dS);
  ptx::wgmma_pin(dS);
}

/// Waits until dV of a step is done. `pending` products that were issued later may still run.
template <int pending, BackwardConfig config>
__device__ __forceinline__ void await_dV(Operands<config>& operands, Sums<config>& sums) {
  ptx::wgmma_wait<pending>(), ptx::wgmma_pin(sums.dV);
  ptx::wgmma_pin(operands.P);
}

/// Computes dK of a step and sends its dS to the owner, unless dS_sent. The step is then over. issue_next() issues S of
/// the next step, so that it runs while the warpgroup waits for dK.
template <bool dS_sent = false, bool issues_next = false, BackwardConfig config, typename IssueNext = Nothing>
__device__ __forceinline__ void finish_step(const Warpgroup<config>& wg, unsigned step, Operands<config>& operands,
                                            Sums<config>& sums, IssueNext issue_next = {}) {
  using S = Shape<config>;
  const PipelineState<S::stages> state(step);
  issue_rows<S::type, S::width>(sums.dK, operands.dS, wg.shared.Q[state.stage], ptx::hide_from_compiler(0));
  if constexpr (!S::separate_dq && !dS_sent)
    send_dS(wg, operands.dS, step);  // sent after the product has been issued, because the fence in it waits
  if constexpr (issues_next) {
    await_dV<1>(operands, sums);
    issue_next();
    ptx::wgmma_wait<1>();  // dK is done
  } else {
    await_dV<0>(operands, sums);  // dK, too
  }
  ptx::wgmma_pin(sums.dK);
  ptx::wgmma_pin(operands.dS);
  if (leads_warpgroup()) ptx::mbarrier_arrive(wg.shared.empty[state.stage]);
}

/// For a step of which the warpgroup sees nothing. The owner multiplies all keys of the block, so it still needs dS:
/// zeros.
template <BackwardConfig config>
__device__ __forceinline__ void skip_step(const Warpgroup<config>& wg, unsigned step) {
  using S = Shape<config>;
  if constexpr (!S::separate_dq) send_dS(wg, {}, step);
  await_all_threads(wg);  // no thread waits for the stage's phase any more
  const int stage = PipelineState<S::stages>(step).stage;
  release_biases<config>(wg.shared, stage);
  if (leads_warpgroup()) ptx::mbarrier_arrive(wg.shared.empty[stage]);
}

/// Runs a step, without overlap with its neighbours.
template <bool may_skip, BackwardConfig config>
__device__ __forceinline__ void run_step(const Warpgroup<config>& wg, unsigned step, Sums<config>& sums) {
  await_step(wg, step);
  if (may_skip && (wg.step(step).hidden >> wg.index & 1) != 0) return skip_step(wg, step);
  typename KeyScores<config>::Tile St;
  Operands<config> operands;
  issue_S(wg, step, St, sums.bias);
  compute_operands(wg, step, St, operands, sums);
  finish_step(wg, step, operands, sums);
}

// -- the loop -------------------------------------------------------------------------------------------------------------

/// Runs steps one after another. dQ is computed one step late, when dS of the other warpgroup has been written.
template <BackwardConfig config>
__device__ __forceinline__ void run_single_steps(const Warpgroup<config>& wg, Sums<config>& sums) {
#pragma unroll 1
  for (unsigned step = wg.first_step; step != wg.end_step; ++step) {
    run_step<true>(wg, step, sums);
    if constexpr (!Shape<config>::separate_dq) {
      if (step != wg.first_step && owns(wg, step - 1)) compute_dQ(wg, step - 1);
    }
  }
}

/// Two steps an iteration: a, whose dQ this warpgroup computes, and b = a + 1. The products of a step are issued under the
/// softmax of its neighbour:
///
///     before the loop:   P(a), dS(a);  dV += P(a) dO;  dS(a) sent
///     for each pair:     issue dK += dS(a) Q;  issue S(b);  P(b), dS(b);  dV += P(b) dO;  dK += dS(b) Q;  dS(b) sent
///                        dQ(a) = dS(a) K, under a causal mask staged while S(a + 2) runs
///                        P(a + 2), dS(a + 2);  dV += P(a + 2) dO;  dS(a + 2) sent
///
/// Only one warpgroup computes dQ of a step. The other runs ahead, so the exponentials of one overlap with the products
/// of the other. The loop is cut where the fewest registers are live and no product runs: dS(a) has been sent, dK has
/// not begun. A loop of single steps, with dQ under a condition, needs more registers.
template <BackwardConfig config>
__device__ __forceinline__ void run_step_pairs(const Warpgroup<config>& wg, unsigned a, Sums<config>& sums) {
  if (a == wg.end_step) return;
  Operands<config> operands;
  const auto finish_first_half = [&](typename KeyScores<config>::Tile& St,
                                     unsigned step) {  // P and dS of a step whose S is in flight
    compute_operands(wg, step, St, operands, sums);
    send_dS(wg, operands.dS, step);
    await_dV<0>(operands, sums);
  };
  {
    typename KeyScores<config>::Tile St;
    await_step(wg, a);
    issue_S(wg, a, St, sums.bias);
    finish_first_half(St, a);
  }
  const auto run_second_step = [&] {  // dK of step a, and all of step b
    typename KeyScores<config>::Tile St;
    finish_step<true, true>(wg, a, operands, sums, [&] { await_step(wg, a + 1), issue_S(wg, a + 1, St, sums.bias); });
    Operands<config> operands;
    compute_operands(wg, a + 1, St, operands, sums);
    finish_step(wg, a + 1, operands, sums);
  };
#pragma unroll 1
  for (; a + 2 < wg.end_step; a += 2) {
    run_second_step();
    typename KeyScores<config>::Tile St;
    const auto issue_next_S = [&] { await_step(wg, a + 2), issue_S(wg, a + 2, St, sums.bias); };
    if constexpr (Shape<config>::skips_first_step) {  // without a mask this loses: the warpgroups stay in step
      compute_dQ(wg, a, issue_next_S);                // S is issued while dQ is staged
    } else {
      compute_dQ(wg, a);
      issue_next_S();
    }
    finish_first_half(St, a + 2);
  }
  if (a + 1 != wg.end_step) {
    run_second_step();
    compute_dQ(wg, a);
  } else {
    finish_step<true>(wg, a, operands, sums);
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void begin_task(Warpgroup<config>& wg) {
  using S = Shape<config>;
  const int seen = wg.task().sequence.visible_kv - wg.task().kv_begin - wg.index * tile_rows;
  const bool nonfinite = !S::separate_dq && wg.shared.nonfinite_lanes[wg.index][wg.thread / 32] != 0;
  wg.edge = ptx::shuffle(seen < tile_rows || nonfinite ? 1 : 0, 0) != 0;
  wg.first_step = ptx::shuffle(wg.work_tile().first_step, 0);
  wg.end_step = ptx::shuffle(wg.work_tile().end_step, 0);
  if constexpr (S::skips_first_step) wg.owned_before = ptx::shuffle(wg.work_tile().owned[wg.index], 0);
}

template <BackwardConfig config>
__device__ __forceinline__ void run_task(Warpgroup<config>& wg, Sums<config>& sums) {
  using S = Shape<config>;
  zero(sums.dK), zero(sums.dV);
  if constexpr (!S::separate_dq) zero_nonfinite_keys(wg);
  begin_task(wg);
  if constexpr (config.loop.overlap == Overlap::pairs) {
    unsigned step = wg.first_step;
    if (step != wg.end_step && owns(wg, step - 1)) run_step<S::skips_first_step>(wg, step++, sums);
    run_step_pairs(wg, step, sums);
  } else {
    run_single_steps(wg, sums);
  }
  if (wg.end_step != wg.first_step && owns(wg, wg.end_step - 1)) {
    if constexpr (!S::separate_dq) compute_dQ<true>(wg, wg.end_step - 1);
  } else {
    // there was no step, and there are no keys to clean
    if (S::separate_dq && wg.end_step == wg.first_step) await_all_threads(wg);
    release_keys(wg);
  }
  store_dKV(wg, sums.dK, sums.dV);
}

template <BackwardConfig config>
__device__ __forceinline__ void run_tasks(Warpgroup<config>& wg, Sums<config>& sums) {
  using S = Shape<config>;
#pragma unroll 1
  for (;; ++wg.task_number) {
    if constexpr (S::direct_dq) prepare_queries(wg, wg.task_number);
    ptx::mbarrier_wait(wg.shared.KV_full, wg.task_number % 2);  // K and V have landed
    if (!wg.work_tile().exists) break;
    run_task(wg, sums);
  }
  stop_sender(wg);
  constexpr bool may_hide = config.features.has_window() || config.features.dropout;
  if constexpr (S::direct_dq && may_hide) repair_keys(wg);
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_two_warpgroups_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 two warpgroups">();
  using namespace backward_sm90;
  using S = Shape<config>;
  static_assert(S::warpgroups == 2);
  auto& shared = begin_block<config>();
  // a shuffle, so that the compiler knows it is uniform
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);
  if (warpgroup == 0) {
    ptx::registers_decrease<S::load_registers>();
    load_and_send<config>(args, shared);
  } else {
    ptx::registers_increase<S::work_registers>();
    if constexpr (config.mask_bits) ptx::griddepcontrol_wait();  // the mask bits are complete
    Consumer<config> consumer{{args, shared, warpgroup - 1, wg_thread()}};
    run_tasks(consumer.wg, consumer.sums);
  }
}

}  // namespace flash_attention
