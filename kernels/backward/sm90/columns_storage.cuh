#pragma once

// The tasks of backward/sm90/columns.cuh, its shared memory, and the lane that loads.

#include "backward/sm90/producer.cuh"
#include "backward/sm90/scores.cuh"
#include "backward/sm90/tile_scheduler.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

enum class Gradient : int { dQ, dK, dV };

constexpr int columns_warpgroups = 2;
constexpr int box_rows = 16;  // of every copy: a stage of Z may have no more

template <BackwardConfig config, Gradient gradient>
struct Columns {
  static constexpr bool of_queries = gradient == Gradient::dQ;  // the rows of the gradient
  static constexpr Rows rows = of_queries ? Rows::queries : Rows::keys;
  static constexpr bool has_dP = gradient != Gradient::dV;
  static constexpr int dim = gradient == Gradient::dV ? config.head_dim_v : config.head_dim;
  static constexpr int chunks = tile::ceil_div(dim, 2 * chunk_dim);  // of a warpgroup's columns
  static constexpr int width = chunks * chunk_dim;
  static constexpr int z_rows = dim > 256 ? 16 : dim > 128 ? 32 : 64;  // of a stage of Z
  static constexpr Map map_X = of_queries ? map_Q : map_K, map_X2 = of_queries ? map_dO : map_V;
  static constexpr Map map_Y = of_queries ? map_K : map_Q, map_Y2 = of_queries ? map_V : map_dO;
  static constexpr Map map_Z = gradient == Gradient::dV ? map_dO : map_Y;
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

  /// use(task) for each task of this block.
  template <typename Use>
  __device__ __forceinline__ static void for_each(const AttentionArgs& args, Use use) {
#pragma unroll 1
    for (int n = blockIdx.x;; n += gridDim.x) {
      const int fresh = ptx::registers_fresh(0);  // nothing of this is kept from task to task
      const int heads = (C::of_queries ? args.heads_q : args.heads_kv) + fresh;
      const TaskOrder order = TaskOrder::make<config>(
          tile::ceil_div((C::of_queries ? args.seq_q : args.seq_kv) + fresh, tile_rows), heads * args.batch,
          C::of_queries ? args.seq_kv + fresh : args.seq_q * args.group + fresh);
      if (n >= order.count()) break;
      const auto place = order[n];
      ColumnsTask task;
      task.sequence = tile::make_sequence<config.features>(args, place.head / heads);
      task.head_idx = place.head % heads;
      task.begin = (C::of_queries ? order.num_tiles - 1 - place.tile : place.tile) * tile_rows;
      if (task.begin >= (C::of_queries ? task.sequence.rows_q : task.sequence.rows_kv)) continue;
      const tile::Score<config.features> score(args, task.sequence,
                                               C::of_queries ? task.head_idx : task.head_idx * args.group);
      if constexpr (C::of_queries) {
        task.tiles = score.template key_tiles<tile_rows, tile_rows>(task.begin);
      } else {
        task.tiles = score.template query_tiles<tile_rows, tile_rows>(task.begin);
      }
      task.num_steps = tile::max(task.tiles.end - task.tiles.begin, 0) * (C::of_queries ? 1 : args.group);
      use(task);
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
  float statistics[columns_warpgroups][2][tile_rows];       // lse2 and delta of a step's queries
  ColumnsTask<config, gradient> tasks[columns_warpgroups];  // of each warpgroup
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
    Task::for_each(args, [&](const Task& task) {
      if (task.num_steps > 0) load(task);
    });
  }

 private:
  /// `rows` rows of 64 columns.
  __device__ __forceinline__ void copy(typename S::Element* to, Map map, ptx::Mbarrier& full, int column, int row, int rows,
                                       int head_idx, int batch_idx) const {
#pragma unroll
    for (int r = 0; r < rows; r += box_rows)
      ptx::tma_load_4d(to + r * chunk_dim, args.maps[map], full, column, row + r, head_idx, batch_idx);
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
      copy(shared.X[c], C::map_X, shared.X_full, c * chunk_dim, row, tile_rows, task.head_idx, batch_idx);
    if constexpr (C::has_dP) {
#pragma unroll 1
      for (int c = 0; c < S::chunks_v; ++c)
        copy(shared.X2[c], C::map_X2, shared.X_full, c * chunk_dim, row, tile_rows, task.head_idx, batch_idx);
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
        copy(shared.ring[next.stage] + w * chunk_elements, map, shared.full[next.stage], c * chunk_dim, sources[w].row,
             tile_rows, sources[w].head_idx, batch_idx);
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
#pragma unroll 1
        for (int c = 0; c < 2 * C::chunks; ++c)
          copy(shared.ring[next.stage] + c * C::z_rows * chunk_dim, C::map_Z, shared.full[next.stage], c * chunk_dim,
               sources[w].row + first, C::z_rows, sources[w].head_idx, batch_idx);
        next.advance();
      }
    }
  }
};

}  // namespace flash_attention::backward_sm90
