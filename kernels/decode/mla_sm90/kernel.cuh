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
// KV blocks of 64 keys go through two stages. Warpgroup w computes the scores of the blocks of stage w; both warpgroups
// multiply P and V of all blocks:
//
//   for each item of the run:                     Q -> shared                                              scores.cuh
//     for each KV block n, warpgroup w:
//       n is of stage w:                          S = Q K^T;  P = softmax step;  P, rescale -> shared     attend_own
//                                                 O_w = O_w * rescale + P V_w
//       n is of the other stage:                  wait for P;  O_w = O_w * rescale + P V_w                issue_other
//     O / sum -> global, or a part of it                                                                 finish.cuh
//
// So the softmax of one warpgroup overlaps with the products of the other. P overwrites the key's own columns in the stage
// (those that are not part of the value; there is room for 64 of them whatever a key has), which are not read any more. The
// third warpgroup is the producer (producer.cuh).

namespace flash_attention::mla {

// The consumer warpgroups: KV blocks of their own stage and of the other, and the loop over items.

template <ForwardConfig config>
struct Attend {
  static constexpr Features features = config.features;
  static constexpr Type type = product_type<config>;
  static constexpr int panel = StageTile::panel_bytes;
  using Scores = typename Scoring<config>::Scores;
  static constexpr int columns = mla_head_dim_v / 2;  // of a warpgroup

  const Scoring<config> scoring;
  float O[columns / 2];
  tile::RowState rows;

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

  /// Few KV blocks raise a maximum, so a vote saves most multiplications. With options there is no register for the vote.
  __device__ __forceinline__ void rescale_output(const float (&rescale)[2]) {
    constexpr bool skips_ones = tile::Score<features>::linear && !features.mask;
    if (skips_ones && !ptx::any(rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) O[i] *= rescale[i / 2 % 2];
  }

  /// Releases this warpgroup's part of a stage (other: of the other warpgroup's stage): its products are complete, so it
  /// may be filled again.
  __device__ __forceinline__ void release(int other) const {
    const Place place;
    if (place.lane == 0) ptx::mbarrier_arrive(scoring.shared.empty[place.warpgroup ^ other][place.warpgroup]);
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

  /// Softmax and P V for a KV block of this warpgroup's stage. Its scores have been issued.
  __device__ __forceinline__ void attend_own(Scores& S, int tile_idx) {
    ptx::wgmma_wait<0>();  // the scores are complete
    ptx::wgmma_pin(reinterpret_cast<float(&)[mla_block_kv / 2]>(S));
    scoring.modify(S, tile_idx);
    typename Scoring<config>::Scales scales;
    scoring.get_scales(scales);
    float rescale[2];
    rows.template update<log2_P_scale<config>, features.bias>(S, scales, rescale);
    unsigned P[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) tile::pack_a<type>(P[step], S[2 * step], S[2 * step + 1]);
    publish(P, rescale);
    rescale_output(rescale);
    const Descriptor V = V_tile(Place().warpgroup);
    ptx::wgmma_fence();  // ordinary instructions have written O and P
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_rs<type, columns, ptx::Major::mn>(O, P[step], V.at(step * 16 * 128), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(O);
    ptx::wgmma_pin(P);
    release(0);
  }

  /// Issues P V for a KV block of the other warpgroup's stage.
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

  /// Waits for these products, but not for `later` groups issued after them; then releases the part of the other stage.
  template <int later>
  __device__ __forceinline__ void finish_other() {
    ptx::wgmma_wait<later>();
    ptx::wgmma_pin(O);
    release(1);
  }

  /// P V for a KV block of the other stage, then the scores of block n. If block n has landed, its scores are issued
  /// without a pause. If not, the part of the other stage is released first, so that its next copies begin meanwhile.
  __device__ __forceinline__ void issue_both(Scores& S, int n) {
    issue_other();
    const bool landed = own_landed(n);
    if (!landed) {
      ptx::wgmma_wait<0>();
      release(1);
    }
    scoring.template issue_scores<0>(S, n);
    ptx::wgmma_wait<1>();  // O is complete
    ptx::wgmma_pin(O);
    if (landed) release(1);
    scoring.template issue_scores<1>(S, n);
    scoring.template issue_scores<2>(S, n);
  }
  __device__ __forceinline__ bool own_landed(int n) const {
    return ptx::shuffle(static_cast<int>(ptx::mbarrier_test(scoring.shared.full[Place().warpgroup][0], n / mla_stages % 2)),
                        0) != 0;
  }

  /// Processes KV blocks [n, n + count) of the run; the first is tile `tile_idx` of the item. The longest code, attend_own,
  /// is inlined only once: code that runs once an item has to be fetched from memory each time.
  __device__ __forceinline__ void attend(int n, int tile_idx, int count) {
    const int end = n + count, shift = tile_idx - n;
    // The shuffle tells the compiler that the condition is uniform.
    if (ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0) != n % mla_stages) {
      issue_other();
      finish_other<0>();
      if (++n == end) return;
    }
    Scores S;
    scoring.template issue_scores<0>(S, n);
    scoring.template issue_scores<1>(S, n);
    scoring.template issue_scores<2>(S, n);
#pragma unroll 1
    while (true) {
      attend_own(S, n + shift);
      if (n + 1 == end) return;
      if (n + 2 == end) break;
      n += 2;
      issue_both(S, n);
    }
    issue_other();
    finish_other<0>();
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
      attend(ptx::shuffle(scoring.shared.done, 0), ptx::shuffle(scoring.shared.cursor.tile, 0),
             ptx::shuffle(scoring.shared.count(), 0));
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
      for (auto& full : shared.full[s]) ptx::mbarrier_init(full, narrow ? 4 : 1);
      for (auto& empty : shared.empty[s]) ptx::mbarrier_init(empty, 4);
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
  // The producer needs more registers if it converts codes to elements, or computes coordinates of boxes.
  constexpr bool large = narrow || config.producer_warp;
  if (warpgroup == 2) {
    ptx::registers_decrease<large ? 72 : 56>();
    if constexpr (narrow) {
      CodeProducer<config>{args, shared}.run();
    } else {
      Producer<config>{args, shared}.run();
    }
  } else {
    ptx::registers_increase<large ? 216 : 224>();
    Attend<config>(args, shared).work();
  }
}

}  // namespace flash_attention
