#pragma once

// The tasks of backward/sm90/columns.cuh, its shared memory, and the lane that loads.

#include "abi/wide_stage.h"
#include "backward/sm90/producer.cuh"
#include "backward/sm90/scores.cuh"
#include "backward/sm90/tile_scheduler.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

enum class Gradient : int { dQ, dK, dV };

constexpr int columns_warpgroups = 2;

template <BackwardConfig config, Gradient gradient>
struct Columns {
  static constexpr bool of_queries = gradient == Gradient::dQ;  // the rows of the gradient
  static constexpr Rows rows = of_queries ? Rows::queries : Rows::keys;
  static constexpr bool has_dP = gradient != Gradient::dV;
  static constexpr Counter counter = of_queries ? counter_queries : has_dP ? counter_dK : counter_keys;
  static constexpr int dim = gradient == Gradient::dV ? config.head_dim_v : config.head_dim;
  static constexpr int chunks = tile::ceil_div(dim, 2 * chunk_dim);  // of a warpgroup's columns
  static constexpr int width = chunks * chunk_dim;
  static constexpr int z_rows = wide_stage_rows(dim);  // of a stage of Z
  static constexpr Map map_X = of_queries ? map_Q : map_K, map_X2 = of_queries ? map_dO : map_V;
  static constexpr Map map_Y = of_queries ? map_K : map_Q, map_Y2 = of_queries ? map_V : map_dO;
  static constexpr Map map_Z = gradient == Gradient::dV ? map_rows_of_dO : of_queries ? map_rows_of_K : map_rows_of_Q;
  static_assert(config.head_dim <= 512 && config.head_dim_v <= 512);
};

/// 64 rows of a gradient, and the steps over which they are walked.
template <BackwardConfig config, Gradient gradient>
struct ColumnsTask {
  using C = Columns<config, gradient>;
  using Element = typename Shape<config>::Element;

  tile::Sequence sequence;
  int head_idx;           // of the rows: a query head, or a key head
  int begin;              // the first row
  tile::TileRange tiles;  // of a walk; dK and dV have one for each query head of the group
  int num_steps;

  struct Step {
    int head_idx;  // a query head
    int q_begin, kv_begin;
  };
  __device__ __forceinline__ Step step(const AttentionArgs& args, int n) const {
    const int count = tiles.end - tiles.begin, walk = n / count, other = (tiles.begin + n - walk * count) * tile_rows;
    if constexpr (C::of_queries) return {head_idx, begin, other};
    return {head_idx * args.group + walk, other, begin};
  }

  __device__ __forceinline__ tile::Rows<Element> result(const AttentionArgs& args) const {
    if constexpr (C::of_queries) return tile::query_rows<Element, config.features>(args.dQ, sequence, head_idx).from(begin);
    return tile::key_rows<Element, config.features>(gradient == Gradient::dK ? args.dK : args.dV, sequence, head_idx)
        .from(begin);
  }

  __device__ __forceinline__ static TaskOrder order(const AttentionArgs& args) {
    const int fresh = ptx::registers_fresh(0);  // nothing of this is kept from task to task
    return TaskOrder::make<config>(tile::ceil_div((C::of_queries ? args.seq_q : args.seq_kv) + fresh, tile_rows),
                                   heads(args) * args.batch + fresh,
                                   C::of_queries ? args.seq_kv + fresh : args.seq_q * args.group + fresh);
  }
  __device__ __forceinline__ static int heads(const AttentionArgs& args) {
    return C::of_queries ? args.heads_q : args.heads_kv;
  }

  /// Makes this the n-th task. Returns whether there are such rows.
  __device__ __forceinline__ bool find(const AttentionArgs& args, int n) {
    const TaskOrder tasks = order(args);
    const auto place = tasks[n];
    sequence = tile::make_sequence<config.features>(args, place.head / heads(args));
    head_idx = place.head % heads(args);
    begin = (C::of_queries ? tasks.num_tiles - 1 - place.tile : place.tile) * tile_rows;
    if (begin >= (C::of_queries ? sequence.rows_q : sequence.rows_kv)) return false;
    const tile::Score<config.features> score(args, sequence, C::of_queries ? head_idx : head_idx * args.group);
    if constexpr (C::of_queries) {
      tiles = score.template key_tiles<tile_rows, tile_rows>(begin);
    } else {
      tiles = score.template query_tiles<tile_rows, tile_rows>(begin);
    }
    num_steps = tile::max(tiles.end - tiles.begin, 0) * (C::of_queries ? 1 : args.group);
    return true;
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
  float statistics[columns_warpgroups][2][tile_rows];       // lse2 and delta of a step's queries
  ColumnsTask<config, gradient> tasks[columns_warpgroups];  // of each warpgroup
  TaskQueue queue;
  ptx::Mbarrier X_full, X_empty, full[S::stages], empty[S::stages], W_full, W_empty;
};

template <BackwardConfig config, Gradient gradient>
struct ColumnsLoader {
  using C = Columns<config, gradient>;
  using S = Shape<config>;
  using Task = ColumnsTask<config, gradient>;

  const AttentionArgs& args;
  ColumnsStorage<config, gradient>& shared;
  PipelineState<S::stages> next{0};
  unsigned num_tasks = 0;

  __device__ __forceinline__ void run() {
    shared.queue.take(workspace<unsigned>(args, Region::tasks) + C::counter, Task::order(args).count(), [&](int n) {
      Task task;
      if (task.find(args, n) && task.num_steps > 0) load(task);
    });
  }

 private:
  /// A tile's rows of 64 columns.
  __device__ __forceinline__ void copy(typename S::Element* to, Map map, ptx::Mbarrier& full, int chunk, int row,
                                       int head_idx, int batch_idx) const {
    ptx::tma_load_4d(to, args.maps[map], full, chunk * chunk_dim, row, head_idx, batch_idx);
  }

  /// Where the rows of a step lie.
  struct Source {
    int row, head_idx;
  };
  __device__ __forceinline__ Source source(const Task& task, int n) const {
    const auto step = task.step(args, tile::min(n, task.num_steps - 1));
    if constexpr (C::of_queries)
      return {static_cast<int>(task.sequence.start_kv) + step.kv_begin, step.head_idx / args.group};
    return {static_cast<int>(task.sequence.start_q) + step.q_begin, step.head_idx};
  }

  /// Both warpgroups have read what was in the next stage.
  __device__ __forceinline__ void begin_stage(int bytes) {
    ptx::mbarrier_wait(shared.empty[next.stage], next.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.full[next.stage], bytes);
  }

  __device__ __forceinline__ void load(const Task& task) {
    const int batch_idx = config.features.packed ? 0 : task.sequence.batch_idx;
    const int row = static_cast<int>(C::of_queries ? task.sequence.start_q : task.sequence.start_kv) + task.begin;
    ptx::mbarrier_wait(shared.X_empty,
                       (num_tasks++ & 1) ^ 1);  // the last products with the rows of the task before are done
    ptx::mbarrier_arrive_expect_tx(shared.X_full, (S::chunks + (C::has_dP ? S::chunks_v : 0)) * chunk_bytes);
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c)
      copy(shared.X[c], C::map_X, shared.X_full, c, row, task.head_idx, batch_idx);
    if constexpr (C::has_dP) {
#pragma unroll 1
      for (int c = 0; c < S::chunks_v; ++c)
        copy(shared.X2[c], C::map_X2, shared.X_full, c, row, task.head_idx, batch_idx);
    }
#pragma unroll 1
    for (int pair = 0; pair < task.num_steps; pair += 2) {
      const Source sources[2] = {source(task, pair), source(task, pair + 1)};
      load_columns(C::map_Y, S::chunks, sources, batch_idx);
      if constexpr (C::has_dP) load_columns(C::map_Y2, S::chunks_v, sources, batch_idx);
      load_rows(sources, batch_idx);
    }
  }

  /// 64 columns of both tiles to a stage.
  __device__ __forceinline__ void load_columns(Map map, int chunks, const Source (&sources)[2], int batch_idx) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      begin_stage(2 * chunk_bytes);
#pragma unroll
      for (int w = 0; w < 2; ++w)
        copy(shared.ring[next.stage] + w * chunk_elements, map, shared.full[next.stage], c, sources[w].row,
             sources[w].head_idx, batch_idx);
      next.advance();
    }
  }

  /// All columns of some rows to a stage. Columns past the head dimension read as zero: the warpgroups have as many.
  __device__ __forceinline__ void load_rows(const Source (&sources)[2], int batch_idx) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll 1
      for (int first = 0; first < tile_rows; first += C::z_rows) {
        begin_stage(2 * C::chunks * C::z_rows * chunk_dim * 2);
        if constexpr (wide_box_chunks(C::dim) > 1) {
          ptx::tma_load_5d(shared.ring[next.stage], args.maps[C::map_Z], shared.full[next.stage], 0, sources[w].row + first,
                           0, sources[w].head_idx, batch_idx);
        } else {
#pragma unroll 1
          for (int c = 0; c < 2 * C::chunks; ++c)
            copy(shared.ring[next.stage] + c * C::z_rows * chunk_dim, C::map_Z, shared.full[next.stage], c,
                 sources[w].row + first, sources[w].head_idx, batch_idx);
        }
        next.advance();
      }
    }
  }
};

}  // namespace flash_attention::backward_sm90
