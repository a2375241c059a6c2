#pragma once

#include "decode/mla_finish.cuh"
#include "decode/mla_producer.cuh"
#include "decode/scores.cuh"
#include "ptx/matrix_store.cuh"
#include "tile/tail.cuh"

// Latent attention (MLA) for few queries, sm_90: wgmma, keys of 576 columns whose first 512 are the values, read once.
//
// Rows are packed and tiles of keys shared out as in decode/sm80 (decode/schedule.cuh). A tile has 64 rows, so O is 64 x
// 512 floats: two warpgroups hold half of its columns each. KV blocks of 64 keys go through two stages; warpgroup w makes
// the scores of the blocks of stage w, and both add up the values of all blocks:
//
//   warpgroup w, KV block n of stage w:           S = Q K^T;  P = softmax step;  P -> shared memory, with what shrinks O
//                                                 O_w = O_w * shrink + P V_w
//   KV block n of the other stage:                wait for P;  O_w = O_w * shrink + P V_w
//
// So one warpgroup's softmax runs under the other's products. P lies where the key's own columns were: nobody needs them
// any more. The third warpgroup loads (mla_producer.cuh).

namespace flash_attention {
namespace mla {

/// A thread's place in its warpgroup, and in accumulators. Worked out where it is needed: kept, it would take registers.
struct Place {
  int thread, warpgroup, lane, warp;
  int row, column;  // the first of its two rows, and its first column in each block of 8

  __device__ __forceinline__ Place() {
    thread = ptx::registers_fresh(static_cast<int>(threadIdx.x));
    warpgroup = thread / wg_threads;
    lane = thread % 32;
    warp = thread / 32 % 4;
    row = 16 * warp + lane / 4;
    column = lane % 4 * 2;
  }
};

template <ForwardConfig config>
struct Attend {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;
  static constexpr int columns = mla_head_dim_v / 2;  // of a warpgroup
  static constexpr int panel = StageTile::panel_bytes;
  using Scores = float[mla_block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  float O[columns / 2];
  tile::RowState rows;

  __device__ __forceinline__ Attend(const AttentionArgs& arguments, SharedStorage<config>& storage)
      : args(arguments), shared(storage) {}

  __device__ __forceinline__ float scale_log2() const {
    if constexpr (!tile::Score<features>::linear) return tile::log2_e;
    return args.scale * (features.kv_scales ? shared.k_scale : 1.0f) * tile::log2_e;
  }

  /// Q of the item that the cursor is at; rows that do not exist are zero.
  __device__ __forceinline__ void start() {
    const decode::Item<config>& item = shared.cursor.item;
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) {
      const decode::Tokens tokens = decode::Item<config>::tokens_of(sequence, item.row_tile);
      shared.sequence = sequence;
      if constexpr (features.kv_scales) {
        shared.k_scale = tile::head_scale<features>(args.K_scale, item.batch_idx, item.kv_head_idx);
        shared.v_by_k_scale = tile::head_scale<features>(args.V_scale, item.batch_idx, item.kv_head_idx) / shared.k_scale;
      }
      shared.seen_by_all =
          tile::Score<features>(args, sequence, item.kv_head_idx * config.group).keys_of_all(tokens.begin, tokens.end);
    }
    const Place place;
    constexpr int chunks = mla_head_dim / 8;
    using Chunk = ptx::Vector<unsigned, 4>;
#pragma unroll 6
    for (int index = place.thread; index < mla_block_q * chunks; index += 2 * wg_threads) {
      const int row = index / chunks, chunk = index % chunks, packed = item.row_tile * config.block_q + row;
      const int query = packed / config.group, head_idx = item.kv_head_idx * config.group + packed % config.group;
      Chunk values{};
      if (query < sequence.rows_q) {
        const auto* from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(query) + chunk * 8;
        values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from));
      }
      ptx::store_shared(ptx::shared_address(&shared.Q) + StageTile::offset(row, chunk), values);
    }
    ptx::fence_async_shared();                          // the products read Q
    ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // Q is there for both warpgroups
    rows = {};
#pragma unroll
    for (float& value : O) value = 0;
  }

  /// Issues S = Q K^T of KV block n.
  __device__ __forceinline__ void issue_scores(Scores& S, int n) const {
    auto& flat = reinterpret_cast<float(&)[mla_block_kv / 2]>(S);
    const int stage = ptx::shuffle(Place().warpgroup, 0);  // known to be the same in a warp
    const Descriptor Q(&shared.Q, 0, 1024), K(&shared.stage[stage], 0, 1024);
#pragma unroll
    for (int step = 0; step < mla_head_dim / 16; ++step) {
      constexpr int steps = panels_of_half * 4;  // of a part
      if (step % steps == 0) {
        ptx::mbarrier_wait(shared.full[stage][step / steps], n / mla_stages % 2);
        ptx::wgmma_fence();  // softmax is done with these registers
      }
      if constexpr (features.kv_scales) {
        if (step == value_panels * 4) scale_values(flat);
      }
      const int at = step / 4 * panel + step % 4 * 32;
      ptx::wgmma_ss<type, mla_block_kv, ptx::Major::k, ptx::Major::k>(flat, Q.at(at), K.at(at), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Between the products of the values' columns and those of the key's own, which have another scale.
  __device__ __forceinline__ void scale_values(float (&S)[mla_block_kv / 2]) const {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(S);
    const float factor = shared.v_by_k_scale;
#pragma unroll
    for (float& score : S) score *= factor;
    ptx::wgmma_fence();  // the products that follow add to them
  }

  __device__ __forceinline__ const unsigned char* P_tile(int stage) const {
    return shared.stage[stage].bytes + value_panels * panel;
  }
  __device__ __forceinline__ Descriptor V_tile(int stage) const {
    return Descriptor(shared.stage[stage].bytes + Place().warpgroup * panels_of_half * panel, panel, 1024);
  }

  __device__ __forceinline__ void shrink_output(const float (&shrink)[2]) {
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
    ptx::wgmma_wait<0>();  // the scores are there
    ptx::wgmma_pin(reinterpret_cast<float(&)[mla_block_kv / 2]>(S));
    if constexpr (features.kv_scales && !tile::Score<features>::linear) {
#pragma unroll
      for (auto& block : S) {
#pragma unroll
        for (float& score : block) score *= shared.k_scale;
      }
    }
    const Place place;
    const int kv_begin = tile_idx * mla_block_kv;
    if (kv_begin < shared.seen_by_all.begin || kv_begin + mla_block_kv > shared.seen_by_all.end) {
      ptx::path<"decode/mla_sm90 edge tile">();
      decode::score_rows<true>(S, args, shared.cursor.item, shared.sequence, place.row, kv_begin + place.column);
    } else if constexpr (!tile::Score<features>::linear) {
      ptx::path<"decode/mla_sm90 inner tile with options">();
      decode::score_rows<false>(S, args, shared.cursor.item, shared.sequence, place.row, kv_begin + place.column);
    } else {
      ptx::path<"decode/mla_sm90 inner tile">();
    }
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
    ptx::barrier_sync(barrier_P + stage, 2 * wg_threads);  // P is there
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] = shared.shrink[stage][place.row + 8 * half];
      rows.max[half] = shared.max[stage][place.row + 8 * half];
      rows.sum[half] *= shrink[half];
    }
    shrink_output(shrink);
    const Descriptor P(P_tile(stage), 0, 1024), V = V_tile(stage);
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
      // The counts of the items that this block may share, while its first tiles are on their way.
      parts.prepare(static_cast<int>(blockIdx.x));
      parts.prepare(shared.run.first_block());
    }
    if (threadIdx.x == 0) shared.done = 0;
#pragma unroll 1
    do {
      ptx::barrier_sync(barrier_attend, 2 * wg_threads);  // the cursor is there
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
  constexpr bool narrow = is_narrow(key_type(config.features));  // codes are held while they become elements
  if (warpgroup == 2) {
    ptx::registers_decrease<narrow ? 72 : 56>();
    Producer<config>{args, shared}.run();
  } else {
    ptx::registers_increase<narrow ? 216 : 224>();
    Attend<config>(args, shared).work();
  }
}

}  // namespace flash_attention
