#pragma once

// For backward/sm90/columns/kernel.cuh: its tasks, its shared memory, and the lane that loads.

#include "abi/wide_stage.h"
#include "backward/sm90/parts/producer.cuh"
#include "backward/sm90/parts/schedule.cuh"
#include "backward/sm90/parts/scores.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

enum class Gradient : int { dQ, dK, dV };

constexpr int columns_warpgroups = 2;
constexpr int columns_cluster = abi::backward_sm90_columns_cluster;
constexpr unsigned short both_blocks = 3;  // of a cluster

template <BackwardConfig config, Gradient gradient>
struct Columns {
  static constexpr bool of_queries = gradient == Gradient::dQ;  // the gradient's rows are queries
  static constexpr Rows rows = of_queries ? Rows::queries : Rows::keys;
  static constexpr bool has_dP = gradient != Gradient::dV;
  static constexpr int dim = gradient == Gradient::dV ? config.head_dim_v : config.head_dim;
  static constexpr int chunks = tile::ceil_div(dim, 2 * chunk_dim);  // of the columns of a warpgroup
  static constexpr int width = chunks * chunk_dim;
  static constexpr int z_rows = wide_stage_rows(dim);  // of a stage of Z
  static constexpr Map map_X = of_queries ? map_Q : map_K, map_X2 = of_queries ? map_dO : map_V;
  static constexpr Map map_Y = of_queries ? map_K : map_Q, map_Y2 = of_queries ? map_V : map_dO;
  static constexpr Map map_Z = gradient == Gradient::dV ? map_rows_of_dO : of_queries ? map_rows_of_K : map_rows_of_Q;
  static_assert(config.head_dim <= 512 && config.head_dim_v <= 512);
};

/// 64 rows of a gradient, and their steps.
template <BackwardConfig config, Gradient gradient>
struct ColumnsTask {
  using C = Columns<config, gradient>;
  using Element = typename Shape<config>::Element;

  tile::Sequence sequence;
  int head_idx;           // of the rows: a query head, or a key head
  int begin;              // the first row
  tile::TileRange tiles;  // of a query head; dK and dV go over them for each head of the group
  int num_steps;

  struct Step {
    int head_idx;  // a query head
    int q_begin, kv_begin;
  };
  __device__ __forceinline__ Step step(const AttentionArgs& args, int n) const {
    if constexpr (C::of_queries) return {head_idx, begin, (tiles.begin + n) * tile_rows};
    const int count = tiles.end - tiles.begin, head = args.group == 1 ? 0 : n / count;  // a division takes long
    return {head_idx * args.group + head, (tiles.begin + n - head * count) * tile_rows, begin};
  }

  __device__ __forceinline__ tile::Rows<Element> result(const AttentionArgs& args) const {
    if constexpr (C::of_queries) return tile::query_rows<Element, config.features>(args.dQ, sequence, head_idx).from(begin);
    return tile::key_rows<Element, config.features>(gradient == Gradient::dK ? args.dK : args.dV, sequence, head_idx)
        .from(begin);
  }

  /// Finds the tiles of both blocks of a cluster. `tile` counts the tiles of a head; this task is one of the two.
  /// Returns whether such rows exist.
  __device__ __forceinline__ bool find(const AttentionArgs& args, int head, int tile) {
    const int heads = C::of_queries ? args.heads_q : args.heads_kv;
    constexpr int rows = columns_cluster * tile_rows;
    const int first = tile * rows;
    sequence = tile::make_sequence<config.features>(args, head / heads);
    head_idx = head % heads;
    if (first >= (C::of_queries ? sequence.rows_q : sequence.rows_kv)) return false;
    begin = first + static_cast<int>(ptx::cluster_rank()) * tile_rows;
    const tile::Visibility<config.features> sight(args, sequence, C::of_queries ? head_idx : head_idx * args.group);
    if constexpr (C::of_queries) {
      tiles = sight.template key_tiles<rows, tile_rows>(first);
    } else {
      tiles = sight.template query_tiles<tile_rows, rows>(first);
    }
    num_steps = tile::max(tiles.end - tiles.begin, 0) * (C::of_queries ? 1 : args.group);
    return true;
  }

  /// Calls use(task) for each task of this block. If a mask makes tasks imbalanced, a long and a short one form a unit.
  /// Only the number n is kept from task to task.
  template <typename Use>
  __device__ __forceinline__ static void for_each(const AttentionArgs& args, int& n, Use use) {
    constexpr int of_unit = config.features.has_window() ? 2 : 1;
    n = static_cast<int>(blockIdx.x) / columns_cluster * of_unit;
#pragma unroll 1
    while (true) {
      const int fresh = ptx::hide_from_compiler(0);
      const int heads = (C::of_queries ? args.heads_q : args.heads_kv) * args.batch + fresh;
      const int tiles = tile::ceil_div((C::of_queries ? args.seq_q : args.seq_kv) + fresh, columns_cluster * tile_rows);
      const int units = tile::ceil_div(tiles, of_unit), unit = n / of_unit, head = unit / units;
      if (head >= heads) break;
      const int place = unit - head * units, opposite = tiles - 1 - place;
      const bool second = n % of_unit != 0;
      ColumnsTask task;
      if (!(second && opposite == place) && task.find(args, head, second ? opposite : place)) use(task);
      n += second || of_unit == 1
               ? (static_cast<int>(gridDim.x) + ptx::hide_from_compiler(0)) / columns_cluster * of_unit - (of_unit - 1)
               : 1;
    }
  }
};

template <BackwardConfig config, Gradient gradient>
struct alignas(1024) ColumnsStorage {
  using S = Shape<config>;
  using Chunk = typename S::Element[chunk_elements];

  Chunk X[S::chunks];
  Chunk X2[Columns<config, gradient>::has_dP ? S::chunks_v : 1];
  typename S::Element ring[S::stages][columns_warpgroups * chunk_elements];
  Chunk W[columns_warpgroups];
  float statistics[columns_warpgroups][2][tile_rows];  // lse2 and delta of a step's queries
  // one for each warpgroup, and one for the lane that loads
  ColumnsTask<config, gradient> tasks[columns_warpgroups + 1];
  // the loading lane's task, and how many tasks it has had
  int loading, num_loaded;
  ptx::Mbarrier X_full, X_empty, full[S::stages], empty[S::stages], W_full, W_empty;
};

template <BackwardConfig config, Gradient gradient>
struct ColumnsProducer {
  using C = Columns<config, gradient>;
  using S = Shape<config>;
  using Task = ColumnsTask<config, gradient>;

  const AttentionArgs& args;
  ColumnsStorage<config, gradient>& shared;
  PipelineState<S::stages> next{0};

  __device__ __forceinline__ void run() {
    shared.num_loaded = 0;
    Task::for_each(args, shared.loading, [&](const Task& task) {
      if (task.num_steps == 0) return;
      shared.tasks[columns_warpgroups] = task;  // registers are short
      load(shared.tasks[columns_warpgroups]);
    });
  }

 private:
  __device__ __forceinline__ static int batch_of(const Task& task) {
    return config.features.packed ? 0 : task.sequence.batch_idx;
  }
  __device__ __forceinline__ static int rank() { return static_cast<int>(ptx::cluster_rank()); }

  /// Loads 64 columns of a tile's rows.
  __device__ __forceinline__ void copy(typename S::Element* to, Map map, ptx::Mbarrier& full, int chunk, int row,
                                       int head_idx, int batch_idx) const {
    ptx::tma_load_4d(to, args.maps[map], full, chunk * chunk_dim, row, head_idx, batch_idx);
  }

  /// The rows of a step.
  struct Source {
    int row, head_idx;
  };
  __device__ __forceinline__ Source source(const Task& task, int n) const {
    const auto step = task.step(args, tile::min(ptx::hide_from_compiler(n), task.num_steps - 1));
    if constexpr (C::of_queries)
      return {static_cast<int>(task.sequence.start_kv) + step.kv_begin, step.head_idx / args.group};
    return {static_cast<int>(task.sequence.start_q) + step.q_begin, step.head_idx};
  }

  /// Waits until the warpgroups of both blocks have read the next stage's earlier contents.
  __device__ __forceinline__ void begin_stage(int bytes) {
    ptx::mbarrier_wait(shared.empty[next.stage], next.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.full[next.stage], bytes);
  }

  __device__ __forceinline__ void load(const Task& task) {
    const int row = static_cast<int>(C::of_queries ? task.sequence.start_q : task.sequence.start_kv) + task.begin;
    ptx::mbarrier_wait(shared.X_empty,
                       (shared.num_loaded++ & 1) ^ 1);  // the last products with the rows of the task before are done
    ptx::mbarrier_arrive_expect_tx(shared.X_full, (S::chunks + (C::has_dP ? S::chunks_v : 0)) * chunk_bytes);
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) copy(shared.X[c], C::map_X, shared.X_full, c, row, task.head_idx, batch_of(task));
    if constexpr (C::has_dP) {
#pragma unroll 1
      for (int c = 0; c < S::chunks_v; ++c)
        copy(shared.X2[c], C::map_X2, shared.X_full, c, row, task.head_idx, batch_of(task));
    }
#pragma unroll 1
    for (int pair = 0; pair < task.num_steps; pair += 2) {
      const Source mine = source(task, pair + rank());
      load_columns(C::map_Y, S::chunks, mine, batch_of(task));
      if constexpr (C::has_dP) load_columns(C::map_Y2, S::chunks_v, mine, batch_of(task));
#pragma unroll 1
      for (int w = 0; w < 2; ++w) load_rows(source(task, pair + w), batch_of(task));
    }
  }

  /// Loads 64 columns of both tiles to a stage: each block of the cluster loads one of the tiles for both blocks.
  __device__ __forceinline__ void load_columns(Map map, int chunks, const Source& mine, int batch_idx) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      begin_stage(2 * chunk_bytes);
      ptx::tma_multicast_4d(shared.ring[next.stage] + rank() * chunk_elements, args.maps[map], shared.full[next.stage],
                            both_blocks, c * chunk_dim, mine.row, mine.head_idx, batch_idx);
      next.advance();
    }
  }

  /// Loads all columns of some rows to a stage, half of them by each block. The warpgroups read columns past the head
  /// dimension, too: TMA fills them with zeros.
  __device__ __forceinline__ void load_rows(const Source& source, int batch_idx) {
#pragma unroll 1
    for (int first = 0; first < tile_rows; first += C::z_rows) {
      begin_stage(2 * C::chunks * C::z_rows * chunk_dim * 2);
      const int first_chunk = rank() * C::chunks;
      auto* const to = shared.ring[next.stage] + first_chunk * C::z_rows * chunk_dim;
      if constexpr (wide_box_chunks(C::dim) > 1) {
        ptx::tma_multicast_5d(to, args.maps[C::map_Z], shared.full[next.stage], both_blocks, 0, source.row + first,
                              first_chunk, source.head_idx, batch_idx);
      } else {
#pragma unroll 1
        for (int c = 0; c < C::chunks; ++c)
          ptx::tma_multicast_4d(to + c * C::z_rows * chunk_dim, args.maps[C::map_Z], shared.full[next.stage], both_blocks,
                                (first_chunk + c) * chunk_dim, source.row + first, source.head_idx, batch_idx);
      }
      next.advance();
    }
  }
};

}  // namespace flash_attention::backward_sm90
