#pragma once

#include "backward/portable.cuh"

// The gradient of the bias, in each shape that a bias may have.
//
// A block owns 64 x 64 elements of dbias (64 elements if the queries broadcast) and sums dS over the axes that broadcast:
//
//     for each batch, head and query tile that share the elements:
//       S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta)      Gradients of backward/portable.cuh
//       total += dS                                                          add_tile
//     [the rows of total are summed];  dbias = total                         sum_rows
//
// There are no atomics and no workspace, and every run has the same bits. Elements that no sequence reaches are written
// as zero. Second derivatives have another dS (second/portable.cuh).

namespace flash_attention {

/// Kernel: whose Head and Gradients give dS.
template <class Kernel>
struct BiasGradient {
  using Bias = ptx::Element<Kernel::features.bias_dtype>;
  static constexpr int block = tile::block_rows;

  struct Range {
    int begin;
    int end;
  };
  /// All of the axis if it broadcasts, otherwise one index of it.
  __device__ static Range along(bool broadcast, int index, int count) {
    return broadcast ? Range{0, count} : Range{index, index + 1};
  }

  /// total += dS of one tile of one head.
  __device__ static void add_tile(float (&total)[4][4], const typename Kernel::Head& head, int q_begin, int kv_begin,
                                  typename Kernel::SharedStorage& storage) {
    const auto& first = Kernel::first_of(head);
    const auto tiles = first.score.sight.template key_tiles<block, block>(q_begin);
    if (kv_begin / block < tiles.begin || kv_begin / block >= tiles.end) return;
    if (first.skips(q_begin, kv_begin)) return;
    typename Kernel::Gradients gradients;
    gradients.template compute<Kernel::Gradients::At::score>(head, q_begin, kv_begin, first.some_hidden(q_begin, kv_begin),
                                                             storage);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!tile::is_hidden(gradients.dS[r][c])) total[r][c] += gradients.dS[r][c];
      }
    }
  }

  /// Sums the tile's rows into row 0 of `tile`, which nothing else uses.
  __device__ static void sum_rows(float (&total)[4][4], tile::WeightTile& tile) {
    const tile::ThreadPlace place;
    tile::store_weights_by_row(tile, total);
    __syncthreads();  // every row is written
    if (place.row != 0) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      total[0][c] = 0;
      for (int row = 0; row < block; ++row) total[0][c] += tile.at[row][place.column + c];
    }
  }
};

template <class Kernel>
__device__ __forceinline__ void bias_gradient(const AttentionArgs& args) {
  if (args.dbias == nullptr) return;
  using Gradient = BiasGradient<Kernel>;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  const bool all_queries = args.dbias_q_stride == 0, all_heads = args.dbias_head_stride == 0,
             all_batch = args.dbias_batch_stride == 0;

  const int num_kv_tiles = tile::ceil_div(args.seq_kv, block_rows), num_q_tiles = tile::ceil_div(args.seq_q, block_rows);
  int index = blockIdx.x;
  const int kv_begin = index % num_kv_tiles * block_rows;
  index /= num_kv_tiles;
  const int q_tile_idx = all_queries ? 0 : index % num_q_tiles;
  if (!all_queries) index /= num_q_tiles;
  const int head_idx = all_heads ? 0 : index % args.heads_q;
  const int batch_idx = all_heads ? index : index / args.heads_q;
  const auto batches = Gradient::along(all_batch, batch_idx, args.batch);
  const auto heads = Gradient::along(all_heads, head_idx, args.heads_q);
  const auto q_tiles = Gradient::along(all_queries, q_tile_idx, num_q_tiles);

  float total[4][4]{};
#pragma unroll 1
  for (int b = batches.begin; b < batches.end; ++b) {
    const tile::Sequence sequence = tile::make_sequence<Kernel::features>(args, b);
#pragma unroll 1
    for (int h = heads.begin; h < heads.end; ++h) {
      const typename Kernel::Head head(args, sequence, h);
#pragma unroll 1
      for (int t = q_tiles.begin; t < q_tiles.end; ++t) Gradient::add_tile(total, head, t * block_rows, kv_begin, storage);
    }
  }
  if (all_queries) Gradient::sum_rows(total, storage.weights);

  const tile::ThreadPlace place;
  const int num_rows = all_queries ? 1 : tile::min(block_rows, args.seq_q - q_tile_idx * block_rows);
  auto* dbias = static_cast<typename Gradient::Bias*>(args.dbias) + batch_idx * args.dbias_batch_stride +
                head_idx * args.dbias_head_stride + q_tile_idx * block_rows * args.dbias_q_stride + kv_begin;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (place.row + r >= num_rows || kv_begin + place.column + c >= args.seq_kv) continue;
      dbias[(place.row + r) * args.dbias_q_stride + place.column + c] =
          ptx::from_float<typename Gradient::Bias>(total[r][c]);
    }
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_dbias(const AttentionArgs& args) {
  bias_gradient<BackwardPortable<config>>(args);
}

}  // namespace flash_attention
