#pragma once

// What the two warpgroups of the kernel for wide heads share: the stages of Q and dO, and the stages of P, which one writes
// and the other reads.

#include "backward/sm90/parts/scores.cuh"
#include "backward/sm90/wide/storage.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::backward_sm90 {

/// One of the warpgroups: 0 computes dV, 1 dK.
template <BackwardConfig config, int index>
struct WideWarpgroup {
  using S = Shape<config>;
  using Math = ScoreMath<config, Rows::keys, tile_rows>;
  using Storage = WideStorage<config>;
  static constexpr Type type = S::type;
  static constexpr int register_steps = 4 * Storage::register_chunks;
  // P is not negative, unless it contains the slope of a program. So without a program, the sign of P tells the other
  // warpgroup which scores are dropped.
  static constexpr bool dropped_are_negative = config.features.dropout && !config.features.score_program;
  static constexpr auto dropped = dropped_are_negative ? Math::Dropped::negative : Math::Dropped::marked;

  const AttentionArgs& args;
  Storage& shared;
  const int thread;         // in the warpgroup
  unsigned tiles = 0;       // tiles of keys that had steps, in earlier tasks
  unsigned first_step = 0;  // steps of earlier tasks

  // -- tiles -------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ auto state_Q(int step) const { return PipelineState<S::stages>(first_step + step); }
  __device__ __forceinline__ auto state_dO(int step) const { return PipelineState<Storage::stages_dO>(first_step + step); }
  __device__ __forceinline__ int stage_Q(int step) const { return state_Q(step).stage; }
  __device__ __forceinline__ int stage_dO(int step) const { return state_dO(step).stage; }

  /// Loads the part of K that is kept in registers as the left operand of its products.
  __device__ __forceinline__ void load_K(const Task<config>& task, unsigned (&K)[tile::max(register_steps, 1)][4]) const {
    const auto rows = rows_of(task, args.K);
    const int lane = thread % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * (thread / 32) + lane / 4 + 8 * r;
      const typename S::Element* first = rows.data + row * rows.stride + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2 * register_steps; ++i) {
        unsigned pair = 0;
        if (row < rows.count) pair = ptx::load_readonly(reinterpret_cast<const unsigned*>(first + 8 * i));
        K[i / 2][r + 2 * (i % 2)] = pair;
      }
    }
  }

  __device__ __forceinline__ const void* await_Q(const Task<config>& task, int step) const {
    const auto state = state_Q(step);
    ptx::mbarrier_wait(shared.Q_full[state.stage], state.phase);  // Q and the statistics have landed
    clear_next_sequence_rows<config>(shared.Q[state.stage], index, thread, task.sequence.len_q - task.q_begin_of(step));
    return shared.Q[state.stage];
  }
  __device__ __forceinline__ const void* await_dO(const Task<config>& task, int step) const {
    const auto state = state_dO(step);
    ptx::mbarrier_wait(shared.dO_full[state.stage], state.phase);  // dO has landed
    clear_next_sequence_rows<config>(shared.dO[state.stage], index, thread, task.sequence.len_q - task.q_begin_of(step));
    return shared.dO[state.stage];
  }
  /// Signals that this warpgroup has read a tile for the last time.
  __device__ __forceinline__ void release(ptx::Mbarrier& empty) const {
    if (thread == 0) ptx::mbarrier_arrive(empty);
  }
  __device__ __forceinline__ auto rows_of(const Task<config>& task, const TensorView& view) const {
    return tile::key_rows<typename S::Element, config.features>(view, task.sequence, task.kv_head_idx).from(task.kv_begin);
  }

  /// Calls use(math) with the scores of a step.
  template <typename Use>
  __device__ __forceinline__ void with_scores(const Task<config>& task, int step, Use use) const {
    const int head_idx = task.head_of(args, step), q_begin = task.q_begin_of(step);
    const tile::Sequence sequence = fresh_sequence(task.sequence);
    const tile::Score<config.features> score(args, sequence, head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    const bool all_visible = score.sight.template all_visible<tile_rows, tile_rows>(q_begin, task.kv_begin) &&
                             !(S::next_sequence_rows && q_begin + tile_rows > score.sight.len_q);
    // The same as Math::of_thread(), with which the compiler would choose other registers.
    const int lane = thread % 32;
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

  __device__ __forceinline__ void make_marks(const Task<config>& task, int step, typename Math::Marks& marks) const {
    with_scores(task, step, [&](const Math& math) {
      marks = {}, math.mark(marks);
      Math::prefetch_mask(math.score.sight, math.q_begin + 2 * tile_rows, math.kv_begin, thread);
    });
  }

  // If the sign of P tells which scores are dropped, the warpgroup of dK needs no marks for them. A boolean mask is
  // read while dP is in flight.
  static constexpr bool asks_early = config.features.mask;
  __device__ __forceinline__ static void mark_gradients(const Math& math, typename Math::Marks& marks) {
    dropped_are_negative ? math.mark_hidden(marks) : math.mark(marks);
  }
  __device__ __forceinline__ void make_early_marks(const Task<config>& task, int step, typename Math::Marks& marks) const {
    if constexpr (asks_early) with_scores(task, step, [&](const Math& math) { marks = {}, mark_gradients(math, marks); });
  }
  __device__ __forceinline__ static void marks_of_gradients(const Math& math, const typename Math::Marks& early,
                                                            typename Math::Marks& marks) {
    if constexpr (asks_early) {
      marks = early;
    } else {
      mark_gradients(math, marks);
    }
  }

  /// Loads the biases of a step, and prefetches those of a later one to L2.
  __device__ __forceinline__ void load_bias(const Task<config>& task, int step, typename Math::Bias& bias) const {
    if constexpr (Math::Bias::present) {
      with_scores(task, step, [&](const Math& math) {
        const int fresh_thread = ptx::hide_from_compiler(thread), later = math.q_begin + 3 * tile_rows;
        bias = Math::load_bias(math.score, math.q_begin, math.kv_begin, fresh_thread);
        Math::Bias::template prefetch<tile_rows, tile_rows>(math.score, later, math.kv_begin, fresh_thread);
      });
    }
  }

  // -- P -----------------------------------------------------------------------------------------------------------------

  /// Announces that all stages of P are empty.
  __device__ __forceinline__ static void announce_empty_P() {
    for (int stage = 0; stage < P_stages; ++stage)
      ptx::barrier_arrive(barrier_P_read + stage, wide_warpgroups * wg_threads);
  }
  /// Waits until the last reads of P have been announced: no arrival may be left over.
  __device__ __forceinline__ static void await_last_reads_of_P() {
#pragma unroll 1
    for (int stage = 0; stage < P_stages; ++stage) ptx::barrier_sync(barrier_P_read + stage, wide_warpgroups * wg_threads);
  }

  __device__ __forceinline__ static void negate_dropped(typename Math::Tile& P, const typename Math::Marks& marks) {
    if constexpr (dropped_are_negative) {
#pragma unroll
      for (int i = 0; i < tile_rows / 2; ++i) P[i] = marks.is_dropped(i) ? -P[i] : P[i];
    }
  }

  /// Sends P as dS needs it (before dropout, with the slope of the soft cap and of the program): each thread's
  /// registers go to the same thread of the other warpgroup.
  __device__ __forceinline__ void send_P(int step, const typename Math::Packed& P) const {
    const unsigned stage = (first_step + step) % P_stages;
    // The other warpgroup has read the stage's earlier contents.
    ptx::barrier_sync(barrier_P_read + stage, wide_warpgroups * wg_threads);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      ptx::store_shared(ptx::shared_address(&shared.P[stage][part][thread]),
                        ptx::Vector<unsigned, 4>{P[part][0], P[part][1], P[part][2], P[part][3]});
    }
    ptx::barrier_arrive(barrier_P_written + stage, wide_warpgroups * wg_threads);
  }

  __device__ __forceinline__ void receive_P(int step, float (&P)[tile_rows / 2]) const {
    const unsigned stage = (first_step + step) % P_stages;
    ptx::barrier_sync(barrier_P_written + stage, wide_warpgroups * wg_threads);  // P is ready
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const auto four = ptx::load_shared<ptx::Vector<unsigned, 4>>(ptx::shared_address(&shared.P[stage][part][thread]));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        P[8 * part + 2 * x] = ptx::unpack_low<type>(four[x]);
        P[8 * part + 2 * x + 1] = ptx::unpack_high<type>(four[x]);
      }
    }
    ptx::barrier_arrive(barrier_P_read + stage, wide_warpgroups * wg_threads);
  }
};

}  // namespace flash_attention::backward_sm90
