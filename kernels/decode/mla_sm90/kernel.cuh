#pragma once

#include "decode/mla_sm90/finish.cuh"
#include "decode/mla_sm90/producer.cuh"
#include "decode/mla_sm90/scores.cuh"
#include "ptx/matrix_store.cuh"
#include "tile/tail.cuh"

// Latent attention (MLA) for few queries, sm_90: wgmma, keys of 512 to 576 columns whose first 512 are the values, read
// once.
//
// Rows are packed, and tiles of keys are distributed over thread blocks, as in decode/sm80 (decode/schedule.cuh). A tile
// has 64 rows, so O is 64 x 512 floats: each of two consumer warpgroups holds half of the columns, 128 registers a thread.
// The KV blocks of an item, of 64 keys each, go through two stages in pairs. Warpgroup 0 computes the scores of the first
// block of a pair, warpgroup 1 those of the second; both multiply P and V of both:
//
//   for each item of the run:             Q -> shared                                                      scores.cuh
//     for each pair of KV blocks:
//       warpgroup 0:                      S0 = Q K0^T;  P0, rescale = softmax step -> shared              attend_first
//                                         O_0 = O_0 * rescale + P0 V0
//                                         wait for P1;  O_0 = O_0 * rescale + P1 V1
//       warpgroup 1:                      wait for the scores of warpgroup 0;  S1 = Q K1^T               attend_second
//                                         wait for P0;  issue O_1 = O_1 * rescale + P0 V0
//                                         P1, rescale = softmax step -> shared
//                                         O_1 = O_1 * rescale + P1 V1
//     O / sum -> global, or a part of it                                                                 finish.cuh
//
// So the softmax of warpgroup 0 overlaps with the scores of warpgroup 1, and that of warpgroup 1 with products of both with
// P0. P overwrites the key's own columns in the stage (those that are not part of the value; there is room for 64 of them
// whatever a key has), which are not read any more. The third warpgroup is the producer (producer.cuh).

namespace flash_attention::mla {

// The consumer warpgroups: KV blocks of their own stage and of the other, and the loop over items.

template <ForwardConfig config>
struct Attend {
  static constexpr Features features = config.features;
  static constexpr Type type = product_type<config>;
  static constexpr int panel = StageTile::panel_bytes;
  using Scores = typename Scoring<config>::Scores;
  static constexpr int columns = mla_head_dim_v / 2;  // of a warpgroup
  /// Codes of 8 bits take longer to become elements than products take. So warpgroup 1 does not wait for its own keys before
  /// it multiplies those of stage 0, which can be loaded again sooner.
  static constexpr bool values_first = is_narrow(key_type(features));

  const Scoring<config> scoring;
  float O[columns / 2];
  tile::RowState rows;
  int parity = 0;  // of the phase that fills this warpgroup's stage

  __device__ __forceinline__ Attend(const AttentionArgs& args, SharedStorage<config>& storage) : scoring{args, storage} {}

  /// Begins an item.
  __device__ __forceinline__ void start() {
    scoring.load_Q();
    rows = {};
#pragma unroll
    for (float& value : O) value = 0;
  }

  __device__ __forceinline__ const unsigned char* P_tile(int stage) const {
    return scoring.shared.stage[stage].bytes + value_panels * panel;
  }
  __device__ __forceinline__ Descriptor V_tile(int stage) const {
    const unsigned char* V = scoring.shared.stage[stage].bytes + Place().warpgroup * panels_of_half * panel;
    return Descriptor(ptx::wgmma_descriptor(V, panel, 1024));
  }

  /// Few KV blocks raise a maximum, so a vote saves most multiplications.
  __device__ __forceinline__ void rescale_output(const float (&rescale)[2]) {
    if (!ptx::any(rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) O[i] *= rescale[i / 2 % 2];
  }

  /// Waits for this warpgroup's products with a stage. Then its half of the value may be filled again.
  __device__ __forceinline__ void finish_products(int stage) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(O);
    release(stage);
  }
  __device__ __forceinline__ void release(int stage) const {
    const Place place;
    if (place.lane == 0) ptx::mbarrier_arrive(scoring.shared.empty[stage][place.warpgroup]);
  }

  /// Publishes P, the maxima and the rescale factors for the other warpgroup.
  __device__ __forceinline__ void publish(const unsigned (&P)[4][4], const float (&rescale)[2]) const {
    const Place place;
    const int stage = place.warpgroup;
    ptx::barrier_sync(barrier_warpgroup + stage,
                      wg_threads);  // the products of all warps have read the keys, which P overwrites
    const int tile = place.lane / 8, row = 16 * place.warp + tile % 2 * 8 + place.lane % 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      auto* to = scoring.shared.stage[stage].bytes + value_panels * panel + StageTile::offset(row, 2 * step + tile / 2);
      ptx::stmatrix_x4(to, P[step][0], P[step][1], P[step][2], P[step][3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (place.lane % 4 != 0) continue;
      scoring.shared.max[stage][place.row + 8 * half] = rows.max[half];
      scoring.shared.rescale[stage][place.row + 8 * half] = rescale[half];
    }
    ptx::fence_async_shared();  // orders P before the other warpgroup's products read it
    __syncwarp();               // bar.arrive needs the lanes of a warp together (the emulator does not check)
    ptx::barrier_arrive(barrier_P + stage, 2 * wg_threads);
  }

  /// P from this warpgroup's scores, of which `largest` are the largest of each row.
  __device__ __forceinline__ void make_P(Scores& S, const float (&largest)[2], unsigned (&P)[4][4], float (&rescale)[2]) {
    typename Scoring<config>::Scales scales;
    scoring.get_scales(scales);
    rows.template raise_and_update<log2_P_scale<config>, features.bias>(S, largest, scales, rescale);
#pragma unroll
    for (int step = 0; step < 4; ++step) tile::pack_a<type>(P[step], S[2 * step], S[2 * step + 1]);
    publish(P, rescale);
  }

  /// Issues P V for the KV block of this warpgroup's stage.
  __device__ __forceinline__ void issue_own(const unsigned (&P)[4][4], const float (&rescale)[2]) {
    rescale_output(rescale);
    const Descriptor V = V_tile(Place().warpgroup);
    ptx::wgmma_fence();  // ordinary instructions have written O and P
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_rs<type, columns, ptx::Major::mn>(O, P[step], V.at(step * 16 * 128), true);
    }
    ptx::wgmma_commit();
  }

  /// The same for the other warpgroup's stage, when P is ready.
  __device__ __forceinline__ void issue_other() {
    const Place place;
    const int stage = place.warpgroup ^ 1;
    ptx::barrier_sync(barrier_P + stage, 2 * wg_threads);  // P is ready
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[half] = scoring.shared.rescale[stage][place.row + 8 * half];
      rows.max[half] = scoring.shared.max[stage][place.row + 8 * half];
      rows.sum[half] *= rescale[half];
    }
    rescale_output(rescale);
    const Descriptor P(ptx::wgmma_descriptor(P_tile(stage), 0, 1024)), V = V_tile(stage);
    ptx::wgmma_fence();  // ordinary instructions have written O
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_ss<type, columns, ptx::Major::k, ptx::Major::mn>(O, P.at(step * 32), V.at(step * 16 * 128), true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ bool own_landed() const {
    return ptx::shuffle(static_cast<int>(ptx::mbarrier_test(scoring.shared.full[Place().warpgroup][0], parity)), 0) != 0;
  }

  /// Issues the scores of warpgroup 0's next KV block. Products with stage 1 have been issued before. If the next keys have
  /// landed there is no pause; if not, stage 1 is released first, so that it can be filled again.
  __device__ __forceinline__ void issue_next(Scores& S) {
    const bool landed = own_landed();
    if (!landed) {
      ptx::wgmma_wait<0>();
      release(1);
    }
    scoring.template issue_part<0>(S, parity);
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(O);
    if (landed) release(1);
    scoring.issue_rest(S, parity);
  }

  /// Warpgroup 1 issues its scores after those of warpgroup 0. If both were issued together both would take twice as long,
  /// and then no product would be left to run beside the softmax of either.
  __device__ __forceinline__ static void give_turn() { ptx::barrier_arrive(barrier_turn, 2 * wg_threads); }
  __device__ __forceinline__ static void wait_for_turn() { ptx::barrier_sync(barrier_turn, 2 * wg_threads); }

  /// Warpgroup 0 processes `count` KV blocks; the first is tile `tile_idx` of the item.
  __device__ __forceinline__ void attend_first(int tile_idx, int count) {
    Scores S;
    scoring.issue_all(S, parity);
    if (count > 1) give_turn();
#pragma unroll 1
    for (int left = count;; left -= 2, tile_idx += 2) {
      unsigned P[4][4];
      float rescale[2];
      ptx::wgmma_wait<0>();  // the scores are complete
      ptx::wgmma_pin(reinterpret_cast<float(&)[mla_block_kv / 2]>(S));
      float largest[2];
      scoring.modify(S, tile_idx, parity);
      tile::row_maxima(S, largest);
      parity ^= 1;
      make_P(S, largest, P, rescale);
      issue_own(P, rescale);
      finish_products(0);
      ptx::wgmma_pin(P);
      if (left == 1) return;
      issue_other();
      if (left == 2) return finish_products(1);
      issue_next(S);
      if (left > 3) give_turn();
    }
  }

  /// Warpgroup 1: as long as there are two KV blocks, softmax of the second runs beside products with the first.
  __device__ __forceinline__ void attend_second(int tile_idx, int count) {
    Scores S;
#pragma unroll 1
    for (int left = count;; tile_idx += 2) {
      wait_for_turn();
      if constexpr (values_first) {
        issue_other();
        finish_products(0);
      }
      scoring.issue_all(S, parity);
      ptx::wgmma_wait<0>();  // the scores are complete
      ptx::wgmma_pin(reinterpret_cast<float(&)[mla_block_kv / 2]>(S));
      float largest[2];
      scoring.modify(S, tile_idx + 1, parity);
      tile::row_maxima(S, largest);
      parity ^= 1;
      if constexpr (!values_first) issue_other();
      unsigned P[4][4];
      float rescale[2];
      make_P(S, largest, P, rescale);
      if constexpr (!values_first) finish_products(0);
      issue_own(P, rescale);
      finish_products(1);
      ptx::wgmma_pin(P);
      left -= 2;
      if (left < 2) return;
    }
  }

  __device__ __forceinline__ void work() {
    if (threadIdx.x == 0) {
      scoring.shared.cursor = scoring.shared.run.start;
      scoring.shared.done = 0;
    }
#pragma unroll 1
    do {
      ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // the cursor is ready
      start();
      // The shuffles tell the compiler that these numbers are uniform, so no product is in a branch that may diverge.
      const int tile_idx = ptx::shuffle(scoring.shared.cursor.tile, 0), count = ptx::shuffle(scoring.shared.count(), 0);
      if (ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0) == 0) {
        attend_first(tile_idx, count);
      } else {
        if (count > 1) attend_second(tile_idx, count);
        if (count % 2 != 0) {
          // Else the compiler adds a fence in a branch, and waits after each product.
          ptx::wgmma_pin(O);
          ptx::wgmma_fence();
          issue_other();
          finish_products(0);
        }
      }
      const Place place;
      typename Scoring<config>::Scales scales;
      scoring.get_scales(scales);
      Finish<config>(scoring.args, scoring.shared, place.warpgroup, place.row, place.warpgroup * columns + place.column)(
          rows, O, scales);
      if (threadIdx.x == 0) {
        const int count = scoring.shared.count();
        scoring.shared.done += count;
        scoring.shared.cursor.tile += count - 1;
        if (scoring.shared.run.begin + scoring.shared.done < scoring.shared.run.end)
          scoring.shared.cursor.next(scoring.args);
      }
      ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // all threads see the new cursor
    } while (scoring.shared.run.begin + scoring.shared.done < scoring.shared.run.end);
  }
};

}  // namespace flash_attention::mla

namespace flash_attention {

template <ForwardConfig config>
__device__ __forceinline__ void decode_mla_sm90(const AttentionArgs& args) {
  using namespace mla;
  using Storage = SharedStorage<config>;
  static_assert(sizeof(Storage) <= mla_shared_bytes, "the planner reserves what SharedStorage needs");
  static_assert(config.head_dim >= mla_head_dim_v && config.head_dim <= mla_columns &&
                config.head_dim_v == mla_head_dim_v && config.block_q == mla_block_q && config.block_kv == mla_block_kv &&
                config.num_warps == 8 && config.features.latent);
  constexpr bool narrow = is_narrow(key_type(config.features));
  auto& shared = ptx::shared_storage<Storage>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < mla_stages; ++s) {
      for (auto& full : shared.full[s]) ptx::mbarrier_init(full, narrow ? 4 : gathers<config> ? wg_threads : 1);
      for (auto& empty : shared.empty[s]) ptx::mbarrier_init(empty, 4);
      ptx::mbarrier_init(shared.marked[s], 4);
    }
    ptx::mbarrier_init_fence();
  }
  tile::clear_output_tail<config>(args, threadIdx.x, mla_threads);
  {
    const decode::Run<config> run(args);
    if (threadIdx.x == 0) shared.run = run;
  }
  __syncthreads();  // all threads see the barriers and the run
  if (shared.run.begin == shared.run.end) return;
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  // The producer needs more registers if it converts codes to elements, or finds the place of each row; with options the
  // consumers need them more.
  constexpr bool large = narrow || (gathers<config> && !config.features.touches_scores());
  if (warpgroup == 2) {
    ptx::registers_decrease<large ? 72 : 56>();
    if constexpr (narrow) {
      CodeProducer<config>{args, shared}.run();
    } else if constexpr (gathers<config>) {
      GatherProducer<config>{args, shared}.run();
    } else {
      BoxProducer<config>{args, shared}.run();
    }
  } else {
    ptx::registers_increase<large ? 216 : 224>();
    Attend<config>(args, shared).work();
  }
}

}  // namespace flash_attention
