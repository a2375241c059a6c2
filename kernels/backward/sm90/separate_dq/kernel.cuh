#pragma once

// dQ for sm_90 (Hopper) by a second kernel: the same bits in every run, and head dimensions to 256.
//
// A work tile is 128 queries of one head, 64 for each of two warpgroups, which loop over the KV tiles (64 rows) they see:
//
//     for each work tile: Q, dO -> shared
//       for each KV tile:
//         S = Q K^T            dP = dO V^T            64 queries x 64 keys, in registers       issue_S, issue_dP
//         P = 2^(S - lse2)     dS = P (dP - delta)    registers                                compute_dS
//         dQ += dS K                                  dS from registers                        issue_dQ
//       dQ * scale -> global
//
// dQ of a tile is issued together with S and dP of the next tile, in this order: when dQ is done, its stage of K is
// free and is loaded again while S and dP run. The stage of V is free when dP is complete. A block takes one work tile
// after another. Q and dO of the next work tile are loaded while dQ of this one is completed and stored.
//
// Warps: of warpgroup 0 one lane loads Q and K, another dO and V (separate_dq/producer.cuh). Warpgroups 1 and 2 compute.
// Registers: 240, or 232 if masks choose the tiles. dQ takes 128 of them at head dimension 256, S and dP 32 each.
// Shared memory: Q and dO of 128 queries, and a ring for the tiles of K and V.

#include "backward/sm90/parts/nonfinite_keys.cuh"
#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/scores.cuh"
#include "backward/sm90/prepare.cuh"
#include "backward/sm90/separate_dq/producer.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"

namespace flash_attention {
namespace backward_sm90 {
/// Computes dQ of a task. Returns how many tiles of keys were loaded for it.
template <BackwardConfig config>
__device__ __forceinline__ unsigned compute_dQ(const QueryWarpgroup<config>& wg, const QueryTask<config>& task) {
  using S = Shape<config>;
  using Math = ScoreMath<config, Rows::queries, tile_rows>;
  const int lane = wg.thread % 32;
  const int q_begin = task.q_begin + wg.index * tile_rows;
  const tile::Score<config.features> score(wg.args, task.sequence, task.head_idx);
  const tile::Dropout dropout(wg.args, task.sequence.batch_idx, task.head_idx);
  const int row = 16 * (wg.thread / 32) + lane / 4;
  const long long padded = task.head_idx * padded_rows(wg.args) + padded_start(wg.args, task.sequence) + q_begin;
  float lse2[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = q_begin + row + 8 * r < score.sight.len_q;
    lse2[r] = exists ? workspace<float>(wg.args, Region::lse2)[padded + row + 8 * r] : tile::infinity;
    delta[r] = exists ? workspace<float>(wg.args, Region::delta)[padded + row + 8 * r] : 0;
  }
  // The addresses of a bias take the registers of dP. So with a bias dP is computed after P instead of under it.
  constexpr bool late_dP = config.features.bias && S::width > 128;
  // The bytes of a boolean mask are loaded while the products are in flight if no other option needs the registers.
  constexpr bool asks_early =
      config.features.mask && !config.features.dropout && !config.features.modifies_scores() && !S::listed;
  float dQ[S::width / 2], scores[tile_rows / 2], dP[tile_rows / 2];
  typename Math::Packed dS;
  typename Math::Bias bias;  // of the tile whose S is in flight
  zero(dQ);

  // Both warpgroups must find the same: they meet in zero_nonfinite_keys_of_stage.
  const auto edge_at = [&](int tile_idx) {
    return !score.sight.template all_visible<query_rows, tile_rows>(task.q_begin, tile_idx * tile_rows) ||
           task.q_begin + query_rows > score.sight.len_q;
  };
  const auto math_of = [&](int tile_idx) {
    const int kv_begin = tile_idx * tile_rows;
    return Math{score,
                dropout,
                score.unit_scale() * tile::log2_e,
                q_begin,
                kv_begin,
                row,
                2 * (lane % 4),
                edge_at(tile_idx),
                {false, false},
                bias};
  };
  using Storage = QueryStorage<config>;
  const auto state_K = [&](unsigned tile) { return PipelineState<Storage::stages_K>(wg.done / 2 + tile); };
  const auto state_V = [&](unsigned tile) { return PipelineState<Storage::stages_V>(wg.done / 2 + tile); };
  QueryPlace place{};  // the current tile, if masks choose
  const auto tile_of = [&](unsigned tile) { return S::listed ? place.tile() : task.tiles.begin + static_cast<int>(tile); };
  const auto issue_S = [&](unsigned tile, int fresh) {
    const auto state = state_K(tile);
    ptx::mbarrier_wait(wg.shared.K_full[state.stage], state.phase);  // K has landed
    if constexpr (S::listed) place = wg.shared.K_place[state.stage];
    ptx::wgmma_fence();  // the registers of S have been used for other things
    issue_dots<S::type, S::steps>(scores, wg.shared.Q[wg.index], wg.shared.K[state.stage], fresh);
    if constexpr (Math::Bias::present) {
      bias = Math::load_bias(score, q_begin, tile_of(tile) * tile_rows, wg.thread);
      Math::Bias::template prefetch<tile_rows, tile_rows>(score, q_begin, (tile_of(tile) + 3) * tile_rows, wg.thread);
    }
  };
  const auto issue_dP = [&](unsigned tile, int fresh) {
    const auto state = state_V(tile);
    ptx::mbarrier_wait(wg.shared.V_full[state.stage], state.phase);  // V has landed
    ptx::wgmma_fence();                                              // the registers of dP have been used for other things
    issue_dots<S::type, S::steps_v>(dP, wg.shared.dO[wg.index], wg.shared.V[state.stage], fresh);
  };
  const auto issue_dQ = [&](unsigned tile, int fresh) {
    issue_rows<S::type, S::width>(dQ, dS, wg.shared.K[state_K(tile).stage], fresh);
  };
  const auto release = [&](ptx::Mbarrier& empty) {
    if (wg.thread == 0) ptx::mbarrier_arrive(empty);
  };
  // Skips tiles that only the other warpgroup sees. They are edges of the block, so both warpgroups must meet in
  // zero_nonfinite_keys_of_stage. When they meet, the other one has waited for K and V of the tile and has released the
  // tiles before, so no stage is released twice before it.
  const auto skip_tiles = [&](unsigned begin, unsigned end) {
#pragma unroll 1
    for (unsigned tile = begin; tile < end; ++tile) {
      zero_nonfinite_keys_of_stage(wg, state_K(tile).stage,
                                   score.sight.visible_kv - (task.tiles.begin + static_cast<int>(tile)) * tile_rows);
      release(wg.shared.K_empty[state_K(tile).stage]);
      release(wg.shared.V_empty[state_V(tile).stage]);
    }
  };
  const auto compute_dS = [&](unsigned tile) {
    const Math math = math_of(tile_of(tile));
    typename Math::Marks marks;
    if constexpr (asks_early) math.mark(marks);
    Math::prefetch_mask(score.sight, q_begin, math.kv_begin + 2 * tile_rows, wg.thread);
    ptx::wgmma_wait<late_dP ? 0 : 1>();  // S is complete; dP may still run
    ptx::wgmma_pin(scores);
    if constexpr (!asks_early) math.mark(marks);
    math.probabilities(
        scores, marks,
        [&](int i) {
          return typename Math::Pair{lse2[Math::row_of(i)], lse2[Math::row_of(i)]};
        },
        [](int, float, float) {});
    if constexpr (late_dP) issue_dP(tile, ptx::hide_from_compiler(0));
    ptx::wgmma_wait<0>();  // dP is complete
    ptx::wgmma_pin(dP);
    release(wg.shared.V_empty[state_V(tile).stage]);
    math.gradients(scores, dP, marks, [&](int i) {
      return typename Math::Pair{delta[Math::row_of(i)], delta[Math::row_of(i)]};
    });
    Math::pack(dP, dS);
    ptx::wgmma_pin(dS);
    if (math.edge) zero_nonfinite_keys_of_stage(wg, state_K(tile).stage, score.sight.visible_kv - math.kv_begin);
  };

  unsigned num_tiles = static_cast<unsigned>(task.tiles.end - task.tiles.begin);
  if constexpr (S::listed) num_tiles = task.first_listed(wg.args) < task.tiles.end ? 1 : 0;
  if (num_tiles > 0) {
    tile::TileRange own = score.sight.template key_tiles<tile_rows, tile_rows>(q_begin);
    // If masks choose the tiles, both warpgroups loop over all of them, so that their counts agree.
    if constexpr (S::listed) own = {task.tiles.begin, task.tiles.end};
    const unsigned first = own.begin < own.end ? own.begin - task.tiles.begin : 0;  // this warpgroup's part of the tiles
    unsigned end = own.begin < own.end ? own.end - task.tiles.begin : 0;
    ptx::mbarrier_wait(wg.shared.Q_full, wg.done & 1);   // Q has landed
    ptx::mbarrier_wait(wg.shared.dO_full, wg.done & 1);  // dO has landed
    if (first < end) {
      skip_tiles(0, first);
      int fresh = ptx::hide_from_compiler(0);
      issue_S(first, fresh);
      if constexpr (!late_dP) issue_dP(first, fresh);
      compute_dS(first);
      unsigned tile = first + 1;
#pragma unroll 1
      for (; S::listed ? !place.is_last() : tile < end; ++tile) {
        fresh = ptx::hide_from_compiler(0);
        issue_dQ(tile - 1, fresh);
        issue_S(tile, fresh);
        ptx::wgmma_wait<1>();  // dQ is done: dS and the stage of K are free; S may still run
        ptx::wgmma_pin(dQ);
        ptx::wgmma_pin(dS);
        release(wg.shared.K_empty[state_K(tile - 1).stage]);
        if constexpr (!late_dP) issue_dP(tile, fresh);
        compute_dS(tile);
      }
      if constexpr (S::listed) num_tiles = end = tile;
      issue_dQ(end - 1, ptx::hide_from_compiler(0));
      ptx::wgmma_wait<0>();  // dQ is complete
      ptx::wgmma_pin(dQ);
      ptx::wgmma_pin(dS);
      release(wg.shared.K_empty[state_K(end - 1).stage]);
    }
    release(wg.shared.Q_empty);
    release(wg.shared.dO_empty);
    skip_tiles(end, num_tiles);
  }
  // The scores of rows past the used length are hidden and nothing that is not finite is left in K, so dQ of these rows
  // is 0.
  auto rows =
      tile::query_rows<typename S::Element, config.features>(wg.args.dQ, task.sequence, task.head_idx).from(q_begin);
  write_rows<S::type, config.head_dim>(rows, dQ, wg.args.scale, wg.thread);
  return num_tiles;
}

template <BackwardConfig config>
__device__ __forceinline__ void run_tasks(QueryWarpgroup<config>& wg) {
  wg.shared.tasks.consume(query_tasks<config>(wg.args).count(), [&](int task_idx) {
    const QueryTask<config> task(wg.args, task_idx);
    if (task.q_begin >= task.sequence.rows_q) return;
    const unsigned tiles = compute_dQ(wg, task);
    if (tiles > 0) wg.done = wg.done + 2 * tiles ^ 1;
  });
}

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_separate_dq_kernel(const abi::AttentionArgs& args) {
  ptx::path<"backward/sm90 dQ apart">();
  using namespace backward_sm90;
  static_assert(sizeof(QueryStorage<config>) <= backward_sm90_dq_shared_bytes(config));
  auto& shared = ptx::shared_storage<QueryStorage<config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();  // all threads see the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  if (warpgroup == 0) {
    ptx::registers_decrease<Shape<config>::listed ? 40 : 24>();
    const int num_tasks = query_tasks<config>(args).count();
    using Storage = QueryStorage<config>;
    if (threadIdx.x == 0) {
      QueryProducer<config, Shape<config>::chunks, Storage::stages_K> producer{
          args,          shared.Q,       shared.Q_full, shared.Q_empty, map_Q,          shared.K,
          shared.K_full, shared.K_empty, map_K,         shared.K_place, shared.lists[0]};
      shared.tasks.produce(workspace<unsigned>(args, Region::tasks) + counter_queries, num_tasks, [&](int task_idx) {
        producer.load({args, task_idx});
      });
    }
    if (threadIdx.x == 32) {
      QueryProducer<config, Shape<config>::chunks_v, Storage::stages_V> producer{
          args,          shared.dO,      shared.dO_full, shared.dO_empty, map_dO,         shared.V,
          shared.V_full, shared.V_empty, map_V,          shared.V_place,  shared.lists[1]};
      shared.tasks.consume(num_tasks, [&](int task_idx) { producer.load({args, task_idx}); });
    }
  } else {
    ptx::registers_increase<Shape<config>::listed ? 232 : 240>();
    QueryWarpgroup<config> wg{args, shared, warpgroup - 1, wg_thread()};
    run_tasks(wg);
  }
}

}  // namespace flash_attention
