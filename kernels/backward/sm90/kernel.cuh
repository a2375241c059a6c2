#pragma once

// Attention backward for sm_90 (Hopper), head dimensions up to 128: dK and dV of a tile of keys, and the tile's share of
// dQ.
//
// A block holds K and V of block_kv keys of one key head, 64 for each of its two warpgroups, and walks over the
// query tiles (64 rows) of every query head of the group. Each step, in every warpgroup:
//
//     S^T = K Q^T          dP^T = V dO^T                          64 keys x 64 queries, in registers
//     P^T = 2^(S^T - lse2)                    dV += P^T dO        P and dS never leave registers as left operands
//     dS^T = P^T (dP^T - delta)               dK += dS^T Q
//     dS to shared memory, transposed
//     one of the warpgroups, in turn:         dQ += dS K          over all keys of the block; added to fp32 sums in memory
//
// Taking turns with dQ lets the others run ahead: the warpgroups drift apart, and one's exponentials hide under another's
// products. dK and dV of a key head are complete in the block: grouped queries need no sums across blocks.
// Where dQ must have the same bits in every run, or the head is too wide, backward/sm90/separate_dq.cuh computes it
// instead.

#include "backward/sm90/prepare.cuh"
#include "backward/sm90/producer.cuh"
#include "backward/sm90/products.cuh"
#include "backward/sm90/scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace flash_attention {
namespace backward_sm90 {

template <BackwardConfig config>
struct alignas(1024) SharedStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  // Tiles are chunks of 64 columns; a chunk is rows of 128 bytes whose 16-byte pieces are swizzled by the row.
  Chunk K[S::warpgroups][S::chunks];
  Chunk V[S::warpgroups][S::chunks_v];
  Chunk Q[S::stages][S::chunks];
  Chunk dO[S::stages][S::chunks_v];
  Chunk dS[config.separate_dq ? 1 : S::warpgroups]
          [config.separate_dq ? 1 : S::warpgroups];  // [step's owner][keys of warpgroup]
  float dQ[config.separate_dq ? 1 : S::warpgroups][4][config.separate_dq ? 4 : 16 * S::width];  // on their way to memory
  float lse2[S::stages][tile_rows];
  float delta[S::stages][tile_rows];
  ptx::Mbarrier full[S::stages], empty[S::stages], KV_full, KV_empty;
  ptx::Mbarrier dS_empty[S::warpgroups];                          // of three warpgroups
  ptx::Mbarrier dQ_full[S::warpgroups], dQ_empty[S::warpgroups];  // between them and their senders
  int dQ_step[S::warpgroups];  // whose dQ is in the staging buffer; no_step: there will be no more
  unsigned num_blocks;         // of the grid; here for the loading warp, which has no register for it
  Step step[steps_kept];
  unsigned nonfinite_lanes[S::warpgroups][4];   // keys with a NaN or Inf, of each warp: two bits for each
  WorkTile<config> work_tile[work_tiles_kept];  // here, not in registers, which are short
};

/// Named barriers; the last two are followed by one for each warpgroup.
enum Barrier : int { barrier_keys = 1, barrier_dS_written = 2, barrier_dS_read = 5 };

constexpr int no_step = -1;

/// One lane of a warpgroup's sender, a warp that adds the dQ it is given to the sums in memory.
template <BackwardConfig config>
__device__ __forceinline__ void send_all_dQ(const AttentionArgs& args, SharedStorage<config>& shared, int warpgroup) {
  constexpr int width = Shape<config>::width;
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(shared.dQ_full[warpgroup], n % 2);  // dQ has been written
    if (shared.dQ_step[warpgroup] == no_step) return;
    const Step& step = shared.step[shared.dQ_step[warpgroup] % steps_kept];
    const long long padded = step.padded;
    const unsigned key_tile = step.key_tile;
    float* const sums = workspace<float>(args, workspace_dQ) + padded * width;
    if (!Shape<config>::ordered || wait_for_order(dq_order_of(args, padded), key_tile)) {
      ptx::bulk_reduce_add(sums, shared.dQ[warpgroup], tile_rows * width * 4);
    } else {
      ptx::bulk_store(sums, shared.dQ[warpgroup], tile_rows * width * 4);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(shared.dQ_empty[warpgroup]);
    if constexpr (Shape<config>::ordered) signal_next(dq_order_of(args, padded), key_tile - 1);
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

/// One warpgroup that computes: 64 keys.
template <BackwardConfig config>
struct Worker {
  using S = Shape<config>;
  using Math = ScoreMath<config, Rows::keys, tile_rows>;
  static constexpr Type type = S::type;

  /// The steps of a task differ in what is seen of them.
  static constexpr bool uneven =
      config.features.window_left || config.features.window_right || config.features.mask || S::next_sequence_rows;

  /// Statistics are read under the products before them.
  static constexpr bool early_statistics = !S::serial_dP;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;  // in the warpgroup
  int work_tile_idx = 0;

  // Of the task: the same in all lanes of a warp, which the compiler knows (they came through a shuffle), so that it keeps
  // them in uniform registers. A load from shared memory takes long under the products' reads.
  unsigned first_step = 0, end_step = 0;
  unsigned owned = 0;  // steps the warpgroup has owned in the tasks before
  bool edge = false;   // the warpgroup does not see everything of any step

  __device__ __forceinline__ const WorkTile<config>& work_tile() const {
    return shared.work_tile[work_tile_idx % work_tiles_kept];
  }
  __device__ __forceinline__ const Task<config>& task() const { return work_tile().task; }

  /// The thread, asked for anew: nothing made of it stays in registers.
  __device__ __forceinline__ static int fresh_thread() {
    return ptx::registers_fresh(static_cast<int>(threadIdx.x)) % wg_threads;
  }

  /// The first thread of the warpgroup.
  __device__ __forceinline__ bool leads() const { return threadIdx.x % wg_threads == 0; }

  // -- keys that must not be multiplied ---------------------------------------------------------------------------------

  /// Zeroes the rows of K that no query may see, and rows with a NaN or Inf: dQ = dS K would multiply them by the zeros of
  /// hidden scores. What a bad key does to the queries that see it, ScoreMath does (nonfinite_row).
  __device__ __forceinline__ void zero_nonfinite_keys() {
    const int thread = fresh_thread();
    const int row = thread / 2;  // two threads share a row
    const bool hidden = task().kv_begin + warpgroup * tile_rows + row >= task().sequence.visible_kv;
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = thread % 2; piece < 8; piece += 2) {
        const auto words =
            ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(shared.K[warpgroup][c]), row, piece));
#pragma unroll
        for (int x = 0; x < 4; ++x) bits |= not_finite<type>(words[x]);
      }
    }
    const unsigned nonfinite_lanes = ptx::ballot(bits != 0);
    if (hidden || (nonfinite_lanes >> (thread % 32 & ~1) & 3) != 0) {
#pragma unroll 1
      for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
        for (int piece = thread % 2; piece < 8; piece += 2) {
          ptx::store_shared(swizzled(ptx::shared_address(shared.K[warpgroup][c]), row, piece), ptx::Vector<unsigned, 4>{});
        }
      }
    }
    ptx::fence_async_shared();  // the zeros before the products; not found by the emulator: tell_owner has one, too
    if (thread % 32 == 0) shared.nonfinite_lanes[warpgroup][thread / 32] = nonfinite_lanes;
    // The owner of a step multiplies the keys of all warpgroups.
    ptx::barrier_sync(barrier_keys, S::warpgroups * wg_threads);
  }

  // -- products ---------------------------------------------------------------------------------------------------------

  /// dQ = dS K over all keys of the block.
  __device__ __forceinline__ void issue_dQ(float (&dQ)[S::width / 2], int fresh) const {
    const unsigned long long dS_desc = ptx::wgmma_descriptor(shared.dS[warpgroup], 0, 1024) + fresh;
    const unsigned long long K_desc = ptx::wgmma_descriptor(shared.K, chunk_bytes, 1024) + fresh;
    ptx::wgmma_fence();  // dQ's registers have been used for other things
#pragma unroll
    for (int step = 0; step < 4 * S::warpgroups; ++step) {
      const int keys = step / 4, inside = step % 4;
      ptx::wgmma_ss<type, S::width, ptx::Major::k, ptx::Major::mn>(
          dQ, dS_desc + (keys * chunk_bytes + inside * 32) / 16,
          K_desc + (keys * S::chunks * chunk_bytes + inside * 2048) / 16, step != 0);
    }
    ptx::wgmma_commit();
  }

  // -- dS and dQ through shared memory ----------------------------------------------------------------------------------

  /// dS^T in registers (keys along the rows) to dS in shared memory (queries along the rows).
  __device__ __forceinline__ void store_dS(const typename Math::Packed& dS, int owner) const {
    const int lane = thread % 32, warp = thread / 32;
    const unsigned chunk = ptx::shared_address(shared.dS[owner][warpgroup]);
    const char* base = reinterpret_cast<const char*>(shared.dS[owner][warpgroup]);
#pragma unroll
    for (int step = 0; step < tile_rows / 16; ++step) {
      const int q = 16 * step + (lane & 7) + 8 * (lane >> 4);
      const unsigned address = swizzled(chunk, q, 2 * warp + (lane >> 3 & 1));
      ptx::stmatrix_x4_trans(const_cast<char*>(base + (address - chunk)), dS[step][0], dS[step][1], dS[step][2],
                             dS[step][3]);
    }
  }

  /// The warpgroup that makes dQ of a step.
  __device__ __forceinline__ int owner_of(unsigned step) const {
    return static_cast<int>((S::skips_first_step ? step - first_step : step) % S::warpgroups);
  }

  /// Gives this warpgroup's dS of a step to the step's owner.
  __device__ __forceinline__ void hand_over(const typename Math::Packed& dS, unsigned step) const {
    const int owner_idx = owner_of(step);
    // The owner's product has read the buffer's earlier dS. The owner itself waited for its own product.
    if (owner_idx != warpgroup && step >= first_step + S::warpgroups)
      ptx::barrier_sync_apart(barrier_dS_read + owner_idx, S::warpgroups * wg_threads);
    store_dS(dS, owner_idx);
    tell_owner(owner_idx);
  }
  __device__ __forceinline__ void tell_owner(int owner_idx) const {
    ptx::fence_async_shared();  // dS before the product that reads it
    if (owner_idx != warpgroup) ptx::barrier_arrive(barrier_dS_written + owner_idx, S::warpgroups * wg_threads);
  }

  /// What this warp sent before has left the staging buffer.
  __device__ __forceinline__ void await_copies() const {
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
  }
  /// A tile of dQ to the staging buffer, which is free, each warp its 16 rows, in the order of its registers.
  template <int width, typename Halfway = Nothing>
  __device__ __forceinline__ void stage(const float (&tile)[width / 2], Halfway halfway = {}) const {
    static_assert(width <= S::width);
    const int lane = thread % 32, warp = thread / 32;
    float* staging = shared.dQ[warpgroup][warp];
#pragma unroll
    for (int group = 0; group < width / 8; ++group) {
      if (group == width / 16) halfway();
      ptx::store_shared(
          ptx::shared_address(staging + (group * 32 + lane) * 4),
          ptx::Vector<float, 4>{tile[4 * group], tile[4 * group + 1], tile[4 * group + 2], tile[4 * group + 3]});
    }
  }
  /// A tile of dK or dV, times a factor, to the staging buffer (SumOrder::by_register). With ordinary stores here the
  /// compiler spills in the walk at head dimension 128.
  template <int width>
  __device__ __forceinline__ void stage_keys(const float (&tile)[width / 2], float factor) const {
    static_assert(width <= S::width);
    const int lane = thread % 32, warp = thread / 32;
    float* staging = shared.dQ[warpgroup][warp];
    await_copies();
#pragma unroll
    for (int group = 0; group < width / 8; ++group) {
      const auto word = [&](int i) { return __builtin_bit_cast(unsigned, tile[4 * group + i] * factor); };
      ptx::stmatrix_x4(staging + (group * 32 + lane) * 4, word(0), word(1), word(2), word(3));
    }
  }
  /// Adds what each warp has staged to the sums in memory.
  template <int width>
  __device__ __forceinline__ void send(float* sums) const {
    const int lane = thread % 32, warp = thread / 32;
    ptx::fence_async_shared();  // the numbers before the copy that reads them
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_reduce_add(sums + 16 * warp * width, shared.dQ[warpgroup][warp], 16 * width * 4);
      ptx::bulk_commit();
    }
  }

  /// Of how many steps before this one the warpgroup was the owner, in all tasks.
  __device__ __forceinline__ unsigned owned_before(unsigned step) const {
    if constexpr (S::skips_first_step) return owned + (step - first_step + 1 - warpgroup) / 2;
    return (step + S::warpgroups - 1 - warpgroup) / S::warpgroups;
  }
  /// dQ of the steps it owned before this one has left the staging buffer.
  __device__ __forceinline__ void await_sender(unsigned step) const {
    ptx::mbarrier_wait(shared.dQ_empty[warpgroup], owned_before(step) % 2 ^ 1);
  }
  /// dQ of a step has been staged.
  __device__ __forceinline__ void tell_sender(int step) const {
    const int thread = fresh_thread();
    ptx::fence_async_shared();  // the numbers before the copy that reads them
    if (thread == 0) shared.dQ_step[warpgroup] = step;
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared.dQ_full[warpgroup]);
  }

  /// After the last task, whose dQ has left the staging buffer.
  __device__ __forceinline__ void dismiss_sender() const {
    if constexpr (!config.separate_dq) tell_sender(no_step);
  }

  /// Where no product brings the threads of the warpgroup together: none waits any more for a phase that the rest has seen.
  __device__ __forceinline__ void await_all_threads() const {
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);
  }
  /// This warpgroup is done with K and V of the task.
  __device__ __forceinline__ void release_keys() const {
    if (leads()) ptx::mbarrier_arrive(shared.KV_empty);
  }

  /// dQ of a step of which this warpgroup is the owner.
  template <bool last = false, typename Halfway = Nothing>
  __device__ __forceinline__ void make_dQ(unsigned step, Halfway halfway = {}) const {
    float dQ[S::width / 2];
    begin_dQ(dQ);
    ptx::wgmma_wait<0>();  // dQ is there
    ptx::wgmma_pin(dQ);
    if constexpr (last) release_keys();  // the next keys come while dQ is sent away
    // dS may be overwritten; told only where that happens, so that nobody leaves arrivals behind.
    if (step + S::warpgroups < end_step) ptx::barrier_arrive(barrier_dS_read + warpgroup, S::warpgroups * wg_threads);
    await_sender(step);
    stage<S::width>(dQ, halfway);
    tell_sender(static_cast<int>(step));
  }
  __device__ __forceinline__ void begin_dQ(float (&dQ)[S::width / 2]) const {
    ptx::barrier_sync(barrier_dS_written + warpgroup, S::warpgroups * wg_threads);  // dS of all warpgroups is there
    issue_dQ(dQ, ptx::registers_fresh(0));
  }

  // -- the walk ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++work_tile_idx) {
      ptx::mbarrier_wait(shared.KV_full, work_tile_idx % 2);  // K and V have landed
      if (!work_tile().exists) break;
      run_task();
    }
    dismiss_sender();
  }

  __device__ __forceinline__ void begin_task() {
    const int seen = task().sequence.visible_kv - task().kv_begin - warpgroup * tile_rows;
    const bool bad = !config.separate_dq && shared.nonfinite_lanes[warpgroup][thread / 32] != 0;
    edge = ptx::shuffle(seen < tile_rows || bad ? 1 : 0, 0) != 0;
    first_step = ptx::shuffle(work_tile().first_step, 0);
    end_step = ptx::shuffle(work_tile().end_step, 0);
    if constexpr (S::skips_first_step) owned = ptx::shuffle(work_tile().owned[warpgroup], 0);
  }

  using Tile = typename Math::Tile;
  /// P and dS of a step, as operands of products.
  struct Operands {
    typename Math::Packed P, dS;
  };

  float dK[S::width / 2], dV[S::width_v / 2];

  __device__ __forceinline__ void await_step(unsigned step) const {
    const PipelineState<S::stages> state(step);
    ptx::mbarrier_wait(shared.full[state.stage], state.phase);  // Q, dO and the statistics have landed
  }

  /// The step has been waited for; now S is on its way.
  __device__ __forceinline__ void begin_S(unsigned step, Tile& St) const {
    const PipelineState<S::stages> state(step);
    if constexpr (S::next_sequence_rows) {
      const int used_rows = task().sequence.len_q - shared.step[step % steps_kept].q_begin;
      clear_next_sequence_rows<config>(shared.Q[state.stage], warpgroup, thread, used_rows);
      clear_next_sequence_rows<config>(shared.dO[state.stage], warpgroup, thread, used_rows);
    }
    ptx::wgmma_fence();  // the registers of S have been used for other things
    issue_dots<type, S::steps>(St, shared.K[warpgroup], shared.Q[state.stage], ptx::registers_fresh(0));
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
    const unsigned nonfinite_lanes = config.separate_dq || !edge ? 0 : shared.nonfinite_lanes[warpgroup][thread / 32];
    const Math math{score,
                    dropout,
                    score.unit_scale() * tile::log2_e,
                    here.q_begin,
                    kv_begin,
                    16 * (thread / 32) + lane / 4,
                    2 * (lane % 4),
                    edge || (uneven && (here.edge >> warpgroup & 1) != 0),
                    {(nonfinite_lanes >> 2 * (lane / 4) & 3) != 0, (nonfinite_lanes >> 2 * (lane / 4) + 16 & 3) != 0}};
    typename Math::Marks marks;
    typename Math::Pair lse2[tile_rows / 8], delta[tile_rows / 8];
    if constexpr (early_statistics) {
#pragma unroll
      for (int group = 0; group < tile_rows / 8; ++group) lse2[group] = pair_of(shared.lse2[state.stage], group);
      begin_dP();
    }

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
    ptx::wgmma_wait<pending>();
    ptx::wgmma_pin(dV);
    ptx::wgmma_pin(operands.P);
  }

  /// dK of a step, and its dS to the owner, who may have it already. begin_next() is called when dV is done and dK runs.
  template <bool handed_over = false, bool begins = false, typename BeginNext = Nothing>
  __device__ __forceinline__ void use_dS(unsigned step, Operands& operands, BeginNext begin_next = {}) {
    const PipelineState<S::stages> state(step);
    issue_rows<type, S::width>(dK, operands.dS, shared.Q[state.stage], ptx::registers_fresh(0));
    if constexpr (!config.separate_dq && !handed_over)
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
    if constexpr (!config.separate_dq) hand_over({}, step);  // for the owner, who multiplies all keys
    await_all_threads();                                     // no thread waits for the stage's phase any more
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
      if constexpr (S::skips_first_step) {  // while dQ is staged; without a mask that keeps the warpgroups in step, and
                                            // loses
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
#pragma unroll
    for (float& x : dK) x = 0;
#pragma unroll
    for (float& x : dV) x = 0;
    if constexpr (!config.separate_dq) zero_nonfinite_keys();
    begin_task();
    const auto owns = [&](unsigned step) { return !config.separate_dq && owner_of(step) == warpgroup; };
    unsigned step = first_step;
    if constexpr (S::software_pipelined) {
      if (step != end_step && owns(step - 1)) walk_step<S::skips_first_step>(step++);
      walk_pairs(step);
    } else {
#pragma unroll 1
      for (; step != end_step; ++step) {
        walk_step<true>(step);
        if constexpr (!config.separate_dq) {
          if (step != first_step && owns(step - 1)) make_dQ(step - 1);  // a step later: dS of the others is there by now
        }
      }
    }
    if (end_step != first_step && owns(end_step - 1)) {
      if constexpr (!config.separate_dq) make_dQ<true>(end_step - 1);
    } else {
      if (config.separate_dq && end_step == first_step) await_all_threads();  // neither steps nor keys to clean
      release_keys();
    }
    finish_task(dK, dV);
  }

  /// Other tasks have dK and dV of the same keys too. The factor of dV is 1, which the compiler does not know: it must not
  /// store the accumulators themselves, which would have to lie where the store wants them.
  __device__ __forceinline__ void add_keys_to_sums(const float (&dK)[S::width / 2],
                                                   const float (&dV)[S::width_v / 2]) const {
    const long long row =
        padded_key<config>(args, task().sequence, task().kv_head_idx) + task().kv_begin + warpgroup * tile_rows;
    const float one = __builtin_bit_cast(float, ptx::registers_fresh(__builtin_bit_cast(int, 1.f)));
    unsigned* const order = dkv_order_of(args, row + warp_keys * (thread / 32));
    const bool in_order = S::ordered && thread % 32 == 0;
    if (in_order) wait_for_order(order, task().gqa_split);
    stage_keys<S::width>(dK, args.scale);
    send<S::width>(workspace<float>(args, workspace_dK) + row * S::width);
    stage_keys<S::width_v>(dV, one);
    send<S::width_v>(workspace<float>(args, workspace_dV) + row * S::width_v);
    if (in_order) signal_next(order, task().gqa_split + 1);
    if (thread % 32 == 0) ptx::bulk_wait_read<0>();  // this may have been the last task
  }

  /// All products of the task are done: dK and dV to memory.
  __device__ __forceinline__ void finish_task(const float (&dK)[S::width / 2], const float (&dV)[S::width_v / 2]) const {
    if constexpr (!config.separate_dq) await_sender(end_step);
    if constexpr (config.key_sums) return add_keys_to_sums(dK, dV);
    const int lane = thread % 32;
    const auto rows_of = [&](const TensorView& view) {
      const int kv_begin = task().kv_begin + warpgroup * tile_rows;
      return tile::key_rows<typename S::Element, config.features>(view, task().sequence, task().kv_head_idx).from(kv_begin);
    };
    if constexpr (!config.separate_dq && S::width_v <= S::width) {
      const int warp = thread / 32;
      char* staging = reinterpret_cast<char*>(shared.dQ[warpgroup][warp]);
      write_staged_rows<type, config.head_dim, S::width>(rows_of(args.dK).from(16 * warp), dK, args.scale, staging, lane);
      write_staged_rows<type, config.head_dim_v, S::width_v>(rows_of(args.dV).from(16 * warp), dV, 1,
                                                             staging + 16 * S::width * 2, lane);
    } else {
      write_rows<type, config.head_dim>(rows_of(args.dK), dK, args.scale, thread);
      write_rows<type, config.head_dim_v>(rows_of(args.dV), dV, 1, thread);
    }
  }
};

/// A block: its first warpgroup loads, run(warpgroup) is what each of the others does.
template <BackwardConfig config, typename Run>
__device__ __forceinline__ void run_block(const AttentionArgs& args, Run run) {
  using S = Shape<config>;
  static_assert(config.num_warps * 32 == S::threads);
  static_assert(sizeof(SharedStorage<config>) <= backward_sm90_shared_bytes(config));
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.full[s], 1);
      ptx::mbarrier_init(shared.empty[s], S::warpgroups);
    }
    for (int w = 0; w < S::warpgroups; ++w) {
      ptx::mbarrier_init(shared.dS_empty[w], wg_threads / 32);
      ptx::mbarrier_init(shared.dQ_full[w], wg_threads / 32);
      ptx::mbarrier_init(shared.dQ_empty[w], 1);
    }
    ptx::mbarrier_init(shared.KV_full, 1);
    ptx::mbarrier_init(shared.KV_empty, S::warpgroups);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  __syncthreads();  // everyone sees the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    ptx::registers_decrease<S::load_registers>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) produce_work_tiles<config>(args, shared);
    if (!config.separate_dq && threadIdx.x % 32 == 0 && warp >= 1 && warp <= S::warpgroups)
      send_all_dQ<config>(args, shared, warp - 1);
  } else {
    ptx::registers_increase<S::work_registers>();
    run(shared, warpgroup - 1);
  }
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 two warpgroups">();
  using namespace backward_sm90;
  static_assert(Shape<config>::warpgroups == 2);
  run_block<config>(args, [&](SharedStorage<config>& shared, int warpgroup) {
    Worker<config>{args, shared, warpgroup, static_cast<int>(threadIdx.x) % wg_threads}.run();
  });
}

}  // namespace flash_attention
