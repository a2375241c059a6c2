#pragma once

// Attention backward for sm_90 (Hopper) with three warpgroups of 64 keys: for head dimensions up to 64 and scores with
// at most one light option. It computes the same as two_warpgroups/kernel.cuh, from the same parts and with the same
// words. Its step differs, because a thread has only 160 registers:
//
//     S^T = K Q^T, dP^T = V dO^T                                 waits for both: meanwhile other warpgroups compute
//     P^T = 2^(S^T - lse2), dS^T = P^T (dP^T - delta)            in one pass, in place: P is not kept in fp32
//     dV += P^T dO, dS to shared memory
//     the owner of the step before:           dQ = dS K          of that step, staged while dK runs
//     dK += dS^T Q                                               then dQ is sent away
//
// dQ is issued after dS of this step has been stored. So the owner of this step waits only for dS, and not for dQ of
// the step before.
//
// Warps: warpgroup 0 loads (warp 0) and sends dQ (warps 1 to 3); warpgroups 1 to 3 compute: this file. Shared memory: K
// and V of 192 keys, three stages of Q and dO, dS of three steps (nine tiles), and dQ on its way to memory. Stage w
// belongs to warpgroup w, which computes dQ of the steps in it.

#include "backward/sm90/parts/dq_exchange.cuh"
#include "backward/sm90/parts/nonfinite_keys.cuh"
#include "backward/sm90/parts/store_dkv.cuh"
#include "ptx/launch.cuh"
#include "ptx/path.cuh"

namespace flash_attention {
namespace backward_sm90 {

/// The state of a warpgroup that computes: its task, its step, its sums.
template <BackwardConfig config>
struct ThreeConsumer {
  using S = Shape<config>;

  Warpgroup<config> wg;
  // From this step on, the warpgroup may see the same part of every step. Then nothing has to be looked up.
  unsigned steady_from = 0;
  bool sees_no_key = false;        // from there on; if false, wg.edge says whether it sees everything
  PipelineState<S::stages> at{0};  // the stage of the step
  float dK[S::width / 2], dV[S::width_v / 2];

  // Without a window a task is steady from its first step on. Under a causal mask it is steady after the first steps of
  // a head, which the diagonal crosses.
  static constexpr bool may_be_steady = !config.features.window_left && !S::next_sequence_rows;
  static constexpr bool always_steady = may_be_steady && !config.features.window_right;
  __device__ __forceinline__ bool is_steady(unsigned step) const {
    return always_steady || (may_be_steady && step >= steady_from);
  }

  /// Whether the warpgroup owns the step before. The stage of a step is its owner's number.
  __device__ __forceinline__ bool owned_last() const {
    return !S::separate_dq && at.stage == (wg.index == S::warpgroups - 1 ? 0 : wg.index + 1);
  }
  static_assert(S::stages == S::warpgroups);
};

// -- a step ---------------------------------------------------------------------------------------------------------------

template <BackwardConfig config>
__device__ __forceinline__ void await_step(ThreeConsumer<config>& c, unsigned step) {
  auto& shared = c.wg.shared;
  ptx::mbarrier_wait(shared.full[c.at.stage], c.at.phase);  // Q, dO and the statistics have landed
  if constexpr (Shape<config>::next_sequence_rows) {
    const int used_rows = c.wg.task().sequence.len_q - c.wg.step(step).q_begin;
    clear_next_sequence_rows<config>(shared.Q[c.at.stage], c.wg.index, fresh_thread(), used_rows);
    clear_next_sequence_rows<config>(shared.dO[c.at.stage], c.wg.index, fresh_thread(), used_rows);
  }
}

/// Stores dS to the buffer of the step's owner. The owner's product has read the buffer's earlier contents.
template <BackwardConfig config>
__device__ __forceinline__ void send_dS(const ThreeConsumer<config>& c, const typename KeyScores<config>::Packed& dS) {
  ptx::mbarrier_wait(c.wg.shared.dS_empty[c.at.stage], c.at.phase ^ 1);
  store_dS(c.wg.fresh(), dS, c.at.stage);
}

/// Stores dQ of a step, which is complete, to the staging buffer. dS has been read.
template <BackwardConfig config>
__device__ __forceinline__ void stage_dQ(const ThreeConsumer<config>& c, const float (&dQ)[Shape<config>::width / 2],
                                         unsigned step) {
  if (fresh_thread() % 32 == 0) ptx::mbarrier_arrive(c.wg.shared.dS_empty[c.wg.index]);
  const Warpgroup<config> wg = c.wg.fresh();
  await_sender(wg, step);
  stage_dQ(wg, dQ);
}

/// Computes dQ of a step outside of any other step.
template <bool last, BackwardConfig config>
__device__ __forceinline__ void compute_dQ_alone(const ThreeConsumer<config>& c, unsigned step) {
  float dQ[Shape<config>::width / 2];
  issue_dQ(c.wg.fresh(), dQ);
  ptx::wgmma_wait<0>();  // dQ is complete
  ptx::wgmma_pin(dQ);
  if constexpr (last) release_keys(c.wg.fresh());  // the next keys are loaded while dQ is sent away
  stage_dQ(c, dQ, step);
  signal_sender(c.wg.fresh(), static_cast<int>(step));
}

/// P and dS of a step as operands, from S and dP. Both are complete before the softmax begins.
template <BackwardConfig config>
__device__ __forceinline__ void compute_operands(const ThreeConsumer<config>& c, unsigned step,
                                                 typename KeyScores<config>::Packed& P,
                                                 typename KeyScores<config>::Packed& dS) {
  using S = Shape<config>;
  using Math = KeyScores<config>;
  const AttentionArgs& args = c.wg.args;
  auto& shared = c.wg.shared;
  const int fresh = ptx::hide_from_compiler(0);
  typename Math::Tile St, dPt;
  ptx::wgmma_fence();  // the registers of S and dP have been used for other things
  issue_dots<S::type, S::steps>(St, shared.K[c.wg.index], shared.Q[c.at.stage], fresh, [&] {
    if constexpr (config.statistics_by_product)
      issue_parts<S::type>(St, shared.statistics.weights, shared.statistics.parts[c.at.stage].lse, fresh);
  });
  issue_dots<S::type, S::steps_v>(dPt, shared.V[c.wg.index], shared.dO[c.at.stage], fresh, [&] {
    if constexpr (config.statistics_by_product)
      issue_parts<S::type>(dPt, shared.statistics.weights, shared.statistics.parts[c.at.stage].delta, fresh);
  });

  // Under the products: where the tile is, and which part of it is hidden. Most tiles need no place; reading it would
  // only load shared memory more.
  const int thread = fresh_thread(), lane = thread % 32;
  const bool is_flagged = shared.statistics.is_flagged(c.at.stage);
  const bool at_edge = c.wg.edge || (!c.is_steady(step) && (c.wg.step(step).edge >> c.wg.index & 1) != 0);
  tile::Sequence sequence{};
  Step here{};
  int kv_begin = 0;
  unsigned nonfinite_lanes = 0;
  if (config.features.touches_scores() || at_edge) {
    sequence = fresh_sequence(c.wg.task().sequence);
    here = c.wg.step(step);
    kv_begin = c.wg.task().kv_begin + c.wg.index * tile_rows;
    if constexpr (!S::separate_dq) nonfinite_lanes = shared.nonfinite_lanes[c.wg.index][thread / 32];
  }
  const tile::Score<config.features> score(args, sequence, here.head_idx);
  const tile::Dropout dropout(args, sequence.batch_idx, here.head_idx);
  Math math = Math::of_thread(score, dropout, here.q_begin, kv_begin, thread);
  math.edge = at_edge;
  math.take_nonfinite_rows(nonfinite_lanes, lane);
  typename Math::Marks marks;
  if constexpr (config.features.dropout) math.mark(marks);

  ptx::wgmma_wait<0>();  // S and dP are complete
  ptx::wgmma_pin(St);
  ptx::wgmma_pin(dPt);
  if (is_flagged) {
    const long long padded = c.wg.step(step).padded;
    subtract_rest<S::type>(St, workspace<float>(args, Region::lse2) + padded, lane);
    subtract_rest<S::type>(dPt, workspace<float>(args, Region::delta) + padded, lane);
  }
  if constexpr (!config.features.dropout) math.mark(marks);
  math.operands(
      St, dPt, marks, [&](int i) { return shared.statistics.lse2_of(c.at.stage, i / 4, lane); },
      [&](int i) { return shared.statistics.delta_of(c.at.stage, i / 4, lane); }, P, dS);
  ptx::wgmma_pin(P);
  ptx::wgmma_pin(dS);
}

/// Runs a step. with_dQ: the warpgroup owns the step before, and all warpgroups have written dS of that step.
template <bool with_dQ, BackwardConfig config>
__device__ __forceinline__ void run_step(ThreeConsumer<config>& c, unsigned step) {
  using S = Shape<config>;
  await_step(c, step);
  if (c.is_steady(step) ? c.sees_no_key : (c.wg.step(step).hidden >> c.wg.index & 1) != 0) {
    if constexpr (!S::separate_dq) send_dS(c, {}), signal_owner(c.wg.fresh(), c.at.stage);  // the owner multiplies all keys
    if constexpr (with_dQ) compute_dQ_alone<false>(c, step - 1);
    await_all_threads(c.wg.fresh());  // no thread waits for the stage's phase any more
  } else {
    const int fresh = ptx::hide_from_compiler(0);
    typename KeyScores<config>::Packed P, dS;
    compute_operands(c, step, P, dS);
    issue_rows<S::type, S::width_v>(c.dV, P, c.wg.shared.dO[c.at.stage], fresh);
    if constexpr (!S::separate_dq) send_dS(c, dS);
    float dQ[S::width / 2];
    if constexpr (with_dQ) issue_dQ(c.wg.fresh(), dQ);
    issue_rows<S::type, S::width>(c.dK, dS, c.wg.shared.Q[c.at.stage], fresh);
    if constexpr (!S::separate_dq)
      signal_owner(c.wg.fresh(), c.at.stage);  // the products are issued before its fence waits
    if constexpr (with_dQ) {
      ptx::wgmma_wait<1>();  // dV and dQ are done; dK may still run
      ptx::wgmma_pin(dQ);
      stage_dQ(c, dQ, step - 1);
    }
    ptx::wgmma_wait<0>();  // dV and dK are done
    ptx::wgmma_pin(c.dV);
    ptx::wgmma_pin(P);
    ptx::wgmma_pin(c.dK);
    ptx::wgmma_pin(dS);
    if constexpr (with_dQ) signal_sender(c.wg.fresh(), static_cast<int>(step - 1));
  }
  if (leads_warpgroup()) ptx::mbarrier_arrive(c.wg.shared.empty[c.at.stage]);
}

// -- the loop -------------------------------------------------------------------------------------------------------------

template <BackwardConfig config>
__device__ __forceinline__ void begin_task(ThreeConsumer<config>& c) {
  using S = Shape<config>;
  constexpr int diagonal_steps = S::warpgroups + 1;
  Warpgroup<config>& wg = c.wg;
  const int first_key = wg.task().kv_begin + wg.index * tile_rows, seen = wg.task().sequence.visible_kv - first_key;
  const bool nonfinite = !S::separate_dq && wg.shared.nonfinite_lanes[wg.index][fresh_thread() / 32] != 0;
  c.sees_no_key = ptx::shuffle(seen <= 0 ? 1 : 0, 0) != 0;
  wg.edge = ptx::shuffle(seen < tile_rows || nonfinite ? 1 : 0, 0) != 0;
  wg.first_step = ptx::shuffle(wg.work_tile().first_step, 0);
  wg.end_step = ptx::shuffle(wg.work_tile().end_step, 0);
  const bool one_head = wg.task().num_steps == wg.task().tiles.end - wg.task().tiles.begin;
  c.steady_from = ptx::shuffle(one_head ? wg.first_step + diagonal_steps : wg.end_step, 0);
}

template <BackwardConfig config>
__device__ __forceinline__ void run_tasks(ThreeConsumer<config>& c) {
  using S = Shape<config>;
  Warpgroup<config>& wg = c.wg;
#pragma unroll 1
  for (;; ++wg.task_number) {
    ptx::mbarrier_wait(wg.shared.KV_full, wg.task_number % 2);  // K and V have landed
    if (!wg.work_tile().exists) return stop_sender(wg.fresh());
    if constexpr (!S::separate_dq) zero_nonfinite_keys(wg.fresh());
    zero(c.dK);
    zero(c.dV);
    begin_task(c);
#pragma unroll 1
    for (unsigned step = wg.first_step; step != wg.end_step; ++step) {
      if (step != wg.first_step && c.owned_last()) {
        run_step<!S::separate_dq>(c, step);
      } else {
        run_step<false>(c, step);
      }
      if (++c.at.stage == S::stages) c.at.stage = 0, c.at.phase ^= 1;
    }
    if (wg.first_step != wg.end_step && c.owned_last()) {
      if constexpr (!S::separate_dq) compute_dQ_alone<true>(c, wg.end_step - 1);
    } else {
      if (S::separate_dq && wg.first_step == wg.end_step) await_all_threads(wg.fresh());  // neither steps nor keys to clean
      release_keys(wg.fresh());
    }
    store_dKV(wg.fresh(), c.dK, c.dV);
  }
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_three_warpgroups_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 three warpgroups">();
  using namespace backward_sm90;
  using S = Shape<config>;
  static_assert(S::warpgroups == 3);
  auto& shared = begin_block<config>();
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  if (warpgroup == 0) {
    ptx::registers_decrease<S::load_registers>();
    load_and_send<config>(args, shared);
  } else {
    ptx::registers_increase<S::work_registers>();
    if constexpr (config.mask_bits) ptx::griddepcontrol_wait();  // the words of the masks are ready
    ThreeConsumer<config> consumer{{args, shared, warpgroup - 1, 0}};
    run_tasks(consumer);
  }
}

}  // namespace flash_attention
