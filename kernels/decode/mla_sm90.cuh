#pragma once

#include "decode/mla_finish.cuh"
#include "decode/mla_producer.cuh"
#include "decode/mla_scores.cuh"
#include "ptx/matrix_store.cuh"
#include "tile/tail.cuh"

// Latent attention (MLA) for few queries, sm_90: wgmma, keys of 576 columns whose first 512 are the values, read once.
//
// Rows are packed, and tiles of keys distributed over thread blocks, as in decode/sm80 (decode/schedule.cuh). A tile has 64
// rows, so O is 64 x 512 floats: two consumer warpgroups hold half of its columns each. KV blocks of 64 keys go through two
// stages; warpgroup w makes the scores of the blocks of stage w, and both add up the values of all blocks:
//
//   for each item of the run:                     Q -> shared                                              mla_scores.cuh
//     for each KV block n, warpgroup w:
//       n is of stage w:                          S = Q K^T;  P = softmax step;  P, shrink -> shared     attend_own
//                                                 O_w = O_w * shrink + P V_w
//       n is of the other stage:                  wait for P;  O_w = O_w * shrink + P V_w                attend_other
//     O / sum -> global, or a part of it                                                                 mla_finish.cuh
//
// So the softmax of one warpgroup runs under the products of the other. P takes the place of the key's own columns in the
// stage: they are read no more. The third warpgroup is the producer (mla_producer.cuh).

namespace flash_attention {
namespace mla {

template <ForwardConfig config>
struct Attend : Scoring<config> {
  using Base = Scoring<config>;
  using Base::features, Base::type, Base::panel, Base::args, Base::shared;
  using Base::scale_log2, Base::load_Q, Base::issue_scores, Base::modify;
  using typename Base::Scores;
  static constexpr int columns = mla_head_dim_v / 2;  // of a warpgroup

  float O[columns / 2];
  tile::RowState rows;

  __device__ __forceinline__ Attend(const AttentionArgs& arguments, SharedStorage<config>& storage)
      : Base{arguments, storage} {}

  /// The beginning of an item.
  __device__ __forceinline__ void start() {
    load_Q();
    rows = {};
#pragma unroll
    for (float& value : O) value = 0;
  }

  __device__ __forceinline__ const unsigned char* P_tile(int stage) const {
    return shared.stage[stage].bytes + value_panels * panel;
  }
  __device__ __forceinline__ Descriptor V_tile(int stage) const {
    const unsigned char* V = shared.stage[stage].bytes + Place().warpgroup * panels_of_half * panel;
    return Descriptor(ptx::wgmma_descriptor(V, panel, 1024));
  }

  /// Few KV blocks raise a maximum. To see that takes a register, which options do not leave.
  __device__ __forceinline__ void shrink_output(const float (&shrink)[2]) {
    if (config.producer_warp && !ptx::any(shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) O[i] *= shrink[i / 2 % 2];
  }

  /// The products of a KV block, of this warpgroup's stage or of the other, are complete: its part of the stage may be
  /// filled again.
  __device__ __forceinline__ void release(int other) const {
    const Place place;
    if (place.lane == 0) ptx::mbarrier_arrive(shared.empty[place.warpgroup ^ other][place.warpgroup]);
  }

  /// P and what goes with it, for the other warpgroup.
  __device__ __forceinline__ void publish(const unsigned (&P)[4][4], const float (&shrink)[2]) const {
    const Place place;
    const int stage = place.warpgroup;
    ptx::barrier_sync(barrier_warpgroup + stage, wg_threads);  // all warps' products have read the keys
    const int tile = place.lane / 8, row = 16 * place.warp + tile % 2 * 8 + place.lane % 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      auto* to = shared.stage[stage].bytes + value_panels * panel + StageTile::offset(row, 2 * step + tile / 2);
      ptx::stmatrix_x4(to, P[step][0], P[step][1], P[step][2], P[step][3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (place.lane % 4 != 0) continue;
      shared.max[stage][place.row + 8 * half] = rows.max[half];
      shared.shrink[stage][place.row + 8 * half] = shrink[half];
    }
    ptx::fence_async_shared();  // the other warpgroup's products read P
    __syncwarp();               // not found by the emulator: bar.arrive wants the lanes of a warp together
    ptx::barrier_arrive(barrier_P + stage, 2 * wg_threads);
  }

  /// KV block n, of this warpgroup's stage.
  __device__ __forceinline__ void attend_own(int n, int tile_idx) {
    Scores S;
    issue_scores(S, n);
    ptx::wgmma_wait<0>();  // the scores are complete
    ptx::wgmma_pin(reinterpret_cast<float(&)[mla_block_kv / 2]>(S));
    modify(S, tile_idx);
    float shrink[2];
    rows.template update<0, features.bias, false>(S, scale_log2(), shrink);
    unsigned P[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) tile::pack_a<type>(P[step], S[2 * step], S[2 * step + 1]);
    publish(P, shrink);
    shrink_output(shrink);
    const Descriptor V = V_tile(Place().warpgroup);
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
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

  /// A KV block of the other stage. Its part is released before anyone waits for the next block to land: the copies of the
  /// one after that begin now.
  __device__ __forceinline__ void attend_other() {
    const Place place;
    const int stage = place.warpgroup ^ 1;
    ptx::barrier_sync(barrier_P + stage, 2 * wg_threads);  // P is ready
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] = shared.shrink[stage][place.row + 8 * half];
      rows.max[half] = shared.max[stage][place.row + 8 * half];
      rows.sum[half] *= shrink[half];
    }
    shrink_output(shrink);
    const Descriptor P(ptx::wgmma_descriptor(P_tile(stage), 0, 1024)), V = V_tile(stage);
    ptx::wgmma_fence();  // O has been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_ss<type, columns, ptx::Major::k, ptx::Major::mn>(O, P.at(step * 32), V.at(step * 16 * 128), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(O);
    release(1);
  }

  /// KV blocks [n, n + count) of the run, of which the first is tile `tile_idx` of the item.
  __device__ __forceinline__ void attend(int n, int tile_idx, int count) {
    const int end = n + count, shift = tile_idx - n;
    // Known to be the same in a warp.
    if (ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0) == n % mla_stages) {
      attend_own(n, n + shift);
      ++n;
    }
#pragma unroll 1
    for (; n + 1 < end; n += 2) {
      attend_other();
      attend_own(n + 1, n + 1 + shift);
    }
    if (n < end) attend_other();
  }

  __device__ __forceinline__ void work() {
    if (threadIdx.x == 0) {
      const decode::Parts<config> parts(args);
      shared.cursor = shared.run.start;
      // The counts of the items that this block may share, while its first tiles are in flight.
      parts.prepare(static_cast<int>(blockIdx.x));
      parts.prepare(shared.run.first_block());
    }
    if (threadIdx.x == 0) shared.done = 0;
#pragma unroll 1
    do {
      ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // the cursor is ready
      start();
      // Known to be the same in a warp: products come in no branch that lanes may take apart.
      attend(ptx::shuffle(shared.done, 0), ptx::shuffle(shared.cursor.tile, 0), ptx::shuffle(shared.count(), 0));
      const Place place;
      Finish<config>(args, shared, place.warpgroup, place.row, place.warpgroup * columns + place.column)(rows, O,
                                                                                                         scale_log2());
      if (threadIdx.x == 0) {
        const int count = shared.count();
        shared.done += count;
        shared.cursor.tile += count - 1;
        if (shared.run.begin + shared.done < shared.run.end) shared.cursor.next(args);
      }
      ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // all know how far the run is
    } while (shared.run.begin + shared.done < shared.run.end);
  }
};

}  // namespace mla

template <ForwardConfig config>
__device__ __forceinline__ void decode_mla_sm90(const AttentionArgs& args) {
  using namespace mla;
  using Storage = SharedStorage<config>;
  static_assert(sizeof(Storage) <= mla_shared_bytes, "the planner reserves what SharedStorage needs");
  static_assert(config.head_dim == mla_head_dim && config.head_dim_v == mla_head_dim_v && config.block_q == mla_block_q &&
                config.block_kv == mla_block_kv && config.num_warps == 8 && config.features.latent);
  auto& shared = ptx::shared_storage<Storage>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < mla_stages; ++s) {
      for (auto& full : shared.full[s]) ptx::mbarrier_init(full, 1);
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
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  // Codes are held while they become elements, and coordinates of boxes.
  constexpr bool large = is_narrow(key_type(config.features)) || config.producer_warp;
  if (warpgroup == 2) {
    ptx::registers_decrease<large ? 72 : 56>();
    Producer<config>{args, shared}.run();
  } else {
    ptx::registers_increase<large ? 216 : 224>();
    Attend<config>(args, shared).work();
  }
}

}  // namespace flash_attention
