#pragma once

// dQ for sm_90 (Hopper) by a kernel of its own: the same bits in every run, and head dimensions to 256.
//
// A block takes 128 queries of one head, 64 for each of its two warpgroups, and walks over the key tiles (64 rows) they
// see:
//
//     S = Q K^T            dP = dO V^T            64 queries x 64 keys, in registers
//     P = 2^(S - lse2)     dS = P (dP - delta)    dQ += dS K, dS from registers
//
// K and V come through one ring of slots, in turn; K of a tile stays until dQ has taken it.

#include "backward/sm90_prepare.cuh"
#include "backward/sm90_products.cuh"
#include "backward/sm90_scores.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace flash_attention {
namespace backward_sm90 {
constexpr int query_warpgroups = 2;
constexpr int query_rows = query_warpgroups * tile_rows;  // of a block
constexpr int barrier_query_keys = 1;

template <BackwardConfig config>
struct alignas(1024) QueryStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];
  static constexpr int slot_chunks = tile::larger(S::chunks, S::chunks_v);

  Chunk Q[query_warpgroups][S::chunks];
  Chunk dO[query_warpgroups][S::chunks_v];
  Chunk KV[config.num_stages][slot_chunks];  // K, V, K, V, ...
  ptx::Mbarrier full[config.num_stages], free[config.num_stages], Q_full;
};

template <BackwardConfig config>
struct QueryTask {
  tile::Sequence sequence;
  int head_idx;
  int q_begin;
  tile::TileRange tiles;  // of keys

  __device__ __forceinline__ explicit QueryTask(const AttentionArgs& args) {
    const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, query_rows), args.heads_q);
    sequence = tile::make_sequence<config.features>(args, block.batch_idx);
    head_idx = block.head_idx;
    q_begin = block.tile_idx * query_rows;
    const tile::Score<config.features> score(args, sequence, head_idx);
    tiles = score.template key_tiles<query_rows, tile_rows>(q_begin);
  }
};

template <BackwardConfig config>
__device__ __forceinline__ void load_keys(const AttentionArgs& args, QueryStorage<config>& shared,
                                          const QueryTask<config>& task) {
  using S = Shape<config>;
  const int batch_idx = config.features.packed ? 0 : task.sequence.batch_idx;
  const int kv_head = task.head_idx / args.group;
  ptx::mbarrier_arrive_expect_tx(shared.Q_full, query_warpgroups * (S::chunks + S::chunks_v) * chunk_bytes);
#pragma unroll 1
  for (int w = 0; w < query_warpgroups; ++w) {
    const int row = static_cast<int>(task.sequence.start_q) + task.q_begin + w * tile_rows;
#pragma unroll
    for (int c = 0; c < S::chunks; ++c)
      ptx::tma_load_4d(shared.Q[w][c], args.maps[map_Q], shared.Q_full, c * chunk_dim, row, task.head_idx, batch_idx);
#pragma unroll
    for (int c = 0; c < S::chunks_v; ++c)
      ptx::tma_load_4d(shared.dO[w][c], args.maps[map_dO], shared.Q_full, c * chunk_dim, row, task.head_idx, batch_idx);
  }
  unsigned use = 0;
#pragma unroll 1
  for (int tile_idx = task.tiles.begin; tile_idx < task.tiles.end; ++tile_idx) {
    const int row = static_cast<int>(task.sequence.start_kv) + tile_idx * tile_rows;
#pragma unroll
    for (int which = 0; which < 2; ++which) {  // K, then V
      const Turn<config.num_stages> turn(use++);
      const int chunks = which == 0 ? S::chunks : S::chunks_v;
      // Both warpgroups are done with what was in the slot. Slots start out free: parity 1 counts as completed.
      ptx::mbarrier_wait(shared.free[turn.slot], turn.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.full[turn.slot], chunks * chunk_bytes);
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        ptx::tma_load_4d(shared.KV[turn.slot][c], args.maps[which == 0 ? map_K : map_V], shared.full[turn.slot],
                         c * chunk_dim, row, kv_head, batch_idx);
      }
    }
  }
}

template <BackwardConfig config>
struct QueryWorker {
  using S = Shape<config>;
  using Math = Scores<config, Rows::queries, tile_rows>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  QueryStorage<config>& shared;
  const QueryTask<config>& task;
  const int warpgroup;
  const int thread;  // in the warpgroup

  /// Zeroes the rows of K in a slot that hold NaN or Inf or belong to no visible key: dS K would multiply them by the zeros
  /// of hidden scores. What they do to the queries that see them is in S by now.
  __device__ __forceinline__ void clean_keys(int slot, int visible_rows) const {
    ptx::barrier_sync(barrier_query_keys, query_warpgroups * wg_threads);  // both warpgroups have their S
    const int row = warpgroup * (tile_rows / 2) + thread / 4;              // four threads share a row
    bool bad = row >= visible_rows;
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = thread % 4; piece < 8; piece += 4) {
        const auto words =
            ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(shared.KV[slot][c]), row, piece));
#pragma unroll
        for (int x = 0; x < 4; ++x) bad = bad || !finite<type>(words[x]);
      }
    }
    const unsigned bad_lanes = ptx::ballot(bad);
    if ((bad_lanes >> (thread % 32 & ~3) & 15) != 0) {
#pragma unroll 1
      for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
        for (int piece = thread % 4; piece < 8; piece += 4) {
          ptx::store_shared(swizzled(ptx::shared_address(shared.KV[slot][c]), row, piece), ptx::Vector<unsigned, 4>{});
        }
      }
    }
    ptx::fence_async_shared();                                             // the zeros before the products that read them
    ptx::barrier_sync(barrier_query_keys, query_warpgroups * wg_threads);  // those of both warpgroups
  }

  __device__ __forceinline__ void run() const {
    const int lane = thread % 32;
    const int q_begin = task.q_begin + warpgroup * tile_rows;
    const tile::Score<config.features> score(args, task.sequence, task.head_idx);
    const tile::Dropout dropout(args, task.sequence.batch_idx, task.head_idx);
    const int row = 16 * (thread / 32) + lane / 4;
    const long long padded = task.head_idx * padded_rows(args) + padded_start(args, task.sequence) + q_begin;
    float lse2[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = q_begin + row + 8 * r < score.len_q;
      lse2[r] = exists ? workspace<float>(args, workspace_lse2)[padded + row + 8 * r] : tile::infinity;
      delta[r] = exists ? workspace<float>(args, workspace_delta)[padded + row + 8 * r] : 0;
    }
    float dQ[S::width / 2], scores[tile_rows / 2], dP[tile_rows / 2];
    typename Math::Packed dS;
    typename Math::Marks marks;
#pragma unroll
    for (float& x : dQ) x = 0;

    const auto math_of = [&](int tile_idx) {
      const int kv_begin = tile_idx * tile_rows;
      const bool edge = !score.template all_visible<query_rows, tile_rows>(task.q_begin, kv_begin) ||
                        task.q_begin + query_rows > score.len_q;
      return Math{score, dropout,       score.unit_scale() * tile::log2_e, q_begin, kv_begin, row, 2 * (lane % 4),
                  edge,  {false, false}};
    };
    const auto slot_of = [](unsigned use) { return Turn<config.num_stages>(use); };
    const auto issue_S = [&](unsigned tile, int fresh) {
      const auto k = slot_of(2 * tile);
      ptx::mbarrier_wait(shared.full[k.slot], k.parity);  // K has landed
      ptx::wgmma_fence();                                 // the registers of S have been used for other things
      issue_dots<type, S::steps>(scores, shared.Q[warpgroup], shared.KV[k.slot], fresh);
    };
    const auto issue_dQ = [&](unsigned tile, int fresh) {
      issue_rows<type, S::width>(dQ, dS, shared.KV[slot_of(2 * tile).slot], fresh);
    };
    const auto make_P = [&](const Math& math) {
      marks = {};
      math.probabilities(
          scores, marks,
          [&](int i) {
            return typename Math::Pair{lse2[Math::row_of(i)], lse2[Math::row_of(i)]};
          },
          [](int, float, float) {});
    };
    const auto make_dS = [&](const Math& math, unsigned tile, int fresh) {
      const auto v = slot_of(2 * tile + 1);
      ptx::mbarrier_wait(shared.full[v.slot], v.parity);  // V has landed
      ptx::wgmma_fence();                                 // the registers of dP have been used for other things
      issue_dots<type, S::steps_v>(dP, shared.dO[warpgroup], shared.KV[v.slot], fresh);
      ptx::wgmma_wait<0>();  // dP is there
      ptx::wgmma_pin(dP);
      if (thread == 0) ptx::mbarrier_arrive(shared.free[v.slot]);
      math.gradients(scores, dP, marks, [&](int i) {
        return typename Math::Pair{delta[Math::row_of(i)], delta[Math::row_of(i)]};
      });
      Math::pack(dP, dS);
      ptx::wgmma_pin(dS);
      if (math.edge) clean_keys(slot_of(2 * tile).slot, score.visible_kv - math.kv_begin);
    };

    ptx::mbarrier_wait(shared.Q_full, 0);  // Q and dO have landed
    const unsigned num_tiles = static_cast<unsigned>(task.tiles.end - task.tiles.begin);
    if (num_tiles > 0) {
      const Math first = math_of(task.tiles.begin);
      int fresh = ptx::registers_fresh(0);
      issue_S(0, fresh);
      ptx::wgmma_wait<0>();  // S is there
      ptx::wgmma_pin(scores);
      make_P(first);
      make_dS(first, 0, fresh);
#pragma unroll 1
      for (unsigned tile = 1; tile < num_tiles; ++tile) {
        const Math math = math_of(task.tiles.begin + static_cast<int>(tile));
        fresh = ptx::registers_fresh(0);
        issue_S(tile, fresh);
        issue_dQ(tile - 1, fresh);
        ptx::wgmma_wait<1>();  // S is there; dQ of the tile before may still run
        ptx::wgmma_pin(scores);
        make_P(math);
        ptx::wgmma_wait<0>();  // that dQ is done: dS and the slot of K are free
        ptx::wgmma_pin(dQ);
        ptx::wgmma_pin(dS);
        if (thread == 0) ptx::mbarrier_arrive(shared.free[slot_of(2 * tile - 2).slot]);
        make_dS(math, tile, fresh);
      }
      issue_dQ(num_tiles - 1, ptx::registers_fresh(0));
      ptx::wgmma_wait<0>();  // dQ is complete
      ptx::wgmma_pin(dQ);
      ptx::wgmma_pin(dS);
    }
    auto rows = tile::query_rows<typename S::Element, config.features>(args.dQ, task.sequence, task.head_idx).from(q_begin);
#pragma unroll
    for (int i = 0; i < S::width / 2; ++i) {
      if (q_begin + row + 8 * Math::row_of(i) >= score.len_q) dQ[i] = 0;  // rows past the used length
    }
    write_rows<type, config.head_dim>(rows, dQ, args.scale, thread);
  }
};

}  // namespace backward_sm90

template <abi::BackwardConfig config>
__device__ __forceinline__ void backward_sm90_dq_kernel(const abi::AttentionArgs& args) {
  using namespace backward_sm90;
  const QueryTask<config> task(args);
  if (task.q_begin >= task.sequence.rows_q) return;
  static_assert(sizeof(QueryStorage<config>) <= backward_sm90_dq_shared_bytes(config));
  auto& shared = ptx::shared_storage<QueryStorage<config>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < config.num_stages; ++s) {
      ptx::mbarrier_init(shared.full[s], 1);
      ptx::mbarrier_init(shared.free[s], query_warpgroups);
    }
    ptx::mbarrier_init(shared.Q_full, 1);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
  __syncthreads();  // everyone sees the barriers

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    ptx::registers_decrease<24>();
    if (threadIdx.x == 0) load_keys(args, shared, task);
  } else {
    ptx::registers_increase<240>();
    QueryWorker<config>{args, shared, task, warpgroup - 1, static_cast<int>(threadIdx.x) % wg_threads}.run();
  }
}

}  // namespace flash_attention
