#pragma once

// For the separate dQ kernel: its work tiles, its shared memory, the two lanes that load (Q and K, dO and V), and the
// state of a warpgroup that computes.

#include "backward/sm90/parts/products.cuh"
#include "backward/sm90/parts/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::backward_sm90 {

constexpr int query_warpgroups = 2;
constexpr int query_rows = query_warpgroups * tile_rows;  // of a block

/// The tile of keys that a stage holds, if masks choose.
struct QueryPlace {
  int word;

  __device__ __forceinline__ int tile() const { return word / 2; }
  __device__ __forceinline__ bool is_last() const { return word % 2 != 0; }
};

template <BackwardConfig config>
struct alignas(1024) QueryStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];
  static constexpr int stages_K = (config.num_stages + 1) / 2;
  static constexpr int stages_V = config.num_stages / 2;

  Chunk Q[query_warpgroups][S::chunks];
  Chunk dO[query_warpgroups][S::chunks_v];
  Chunk K[stages_K][S::chunks];
  Chunk V[stages_V][S::chunks_v];
  ptx::Mbarrier Q_full, Q_empty, K_full[stages_K], K_empty[stages_K];
  ptx::Mbarrier dO_full, dO_empty, V_full[stages_V], V_empty[stages_V];
  TaskQueue tasks;
  QueryPlace K_place[S::listed ? stages_K : 1], V_place[S::listed ? stages_V : 1];  // announced with the tiles
  tile::KeyTileList<S::features, query_rows> lists[2];  // for the loading lanes, which have no registers for them

  __device__ __forceinline__ void init() {
    for (auto& barrier : K_full) ptx::mbarrier_init(barrier, 1);
    for (auto& barrier : V_full) ptx::mbarrier_init(barrier, 1);
    for (auto& barrier : K_empty) ptx::mbarrier_init(barrier, query_warpgroups);
    for (auto& barrier : V_empty) ptx::mbarrier_init(barrier, query_warpgroups);
    ptx::mbarrier_init(Q_full, 1);
    ptx::mbarrier_init(dO_full, 1);
    ptx::mbarrier_init(Q_empty, query_warpgroups);
    ptx::mbarrier_init(dO_empty, query_warpgroups);
    tasks.init(query_warpgroups * wg_threads + 1);
    ptx::mbarrier_init_fence();  // TMA sees the barriers
  }
};

template <BackwardConfig config>
__device__ __forceinline__ TaskOrder query_tasks(const AttentionArgs& args) {
  return TaskOrder::make<config>(tile::ceil_div(args.seq_q, query_rows), args.heads_q * args.batch, args.seq_kv);
}

template <BackwardConfig config>
struct QueryTask {
  tile::Sequence sequence;
  int head_idx;
  int q_begin;
  tile::TileRange tiles;  // of keys

  __device__ __forceinline__ QueryTask(const AttentionArgs& args, int task_idx) {
    const TaskOrder order = query_tasks<config>(args);
    const auto place = order[task_idx];
    sequence = tile::make_sequence<config.features>(args, place.head / args.heads_q);
    head_idx = place.head % args.heads_q;
    q_begin = (order.num_tiles - 1 - place.tile) * query_rows;
    const tile::Visibility<config.features> sight(args, sequence, head_idx);
    tiles = sight.template key_tiles<query_rows, tile_rows>(q_begin);
  }

  /// The first tile that masks show, or tiles.end.
  __device__ __forceinline__ int first_listed(const AttentionArgs& args) const {
    return tile::KeyTileList<config.features, query_rows>{}
        .set(args, sequence, head_idx, q_begin)
        .seek(tiles.begin, tiles.end);
  }
};

/// The loads of one lane: Q of a task and K of its tiles, or dO and V. `places` belongs to its ring.
template <BackwardConfig config, int chunks, int stages>
struct QueryProducer {
  using Chunk = typename QueryStorage<config>::Chunk;

  const AttentionArgs& args;
  Chunk (&rows)[query_warpgroups][chunks];
  ptx::Mbarrier &rows_full, &rows_empty;
  Map rows_map;
  Chunk (&ring)[stages][chunks];
  ptx::Mbarrier (&full)[stages], (&empty)[stages];
  Map ring_map;
  QueryPlace* places;  // of the ring
  tile::KeyTileList<config.features, query_rows>& list;
  unsigned tasks = 0, tiles = 0;  // so far

  __device__ __forceinline__ void load(const QueryTask<config>& task) {
    list.set(args, task.sequence, task.head_idx, task.q_begin);
    // tiles left, including those that masks hide between them
    int left = task.tiles.end - list.seek(task.tiles.begin, task.tiles.end);
    if (left <= 0) return;
    const int batch_idx = config.features.packed ? 0 : task.sequence.batch_idx, kv_head_idx = task.head_idx / args.group;
    ptx::mbarrier_wait(rows_empty, (tasks++ & 1) ^ 1);  // the last products with the rows of the task before are done
    ptx::mbarrier_arrive_expect_tx(rows_full, query_warpgroups * chunks * chunk_bytes);
    int row = static_cast<int>(task.sequence.start_q) + task.q_begin;
#pragma unroll
    for (int w = 0; w < query_warpgroups; ++w, row += tile_rows)
      load_tile(rows[w], rows_full, args.maps[rows_map], row, task.head_idx, batch_idx);
    row = static_cast<int>(task.sequence.start_kv) + (task.tiles.end - left) * tile_rows;
#pragma unroll 1
    while (left > 0) {
      const PipelineState<stages> state(tiles++);
      // Both warpgroups are done with the stage's earlier tile. Stages start out empty: phase 1 counts as completed.
      ptx::mbarrier_wait(empty[state.stage], state.phase ^ 1);
      int step = 1;
      if constexpr (QueryStorage<config>::S::listed) {
        step = list.seek(task.tiles.end - left + 1, task.tiles.end) - (task.tiles.end - left);
        places[state.stage] = {2 * (task.tiles.end - left) + (step == left ? 1 : 0)};
      }
      ptx::mbarrier_arrive_expect_tx(full[state.stage], chunks * chunk_bytes);
      load_tile(ring[state.stage], full[state.stage], args.maps[ring_map], row, kv_head_idx, batch_idx);
      left -= step;
      row += step * tile_rows;
    }
  }
};

/// A warpgroup that computes: dQ of 64 queries.
template <BackwardConfig config>
struct QueryWarpgroup {
  using S = Shape<config>;
  static constexpr int warpgroups = query_warpgroups, barrier_keys = 1;  // zero_nonfinite_keys_of_stage

  const AttentionArgs& args;
  QueryStorage<config>& shared;
  const int index;    // its rows begin at row 64 * index of the block
  const int thread;   // in the warpgroup
  unsigned done = 0;  // in earlier tasks: twice the tiles, plus 1 if an odd number of tasks had tiles
};

}  // namespace flash_attention::backward_sm90
