#pragma once

#include "ptx/shared.cuh"
#include "standard/matrices.cuh"
#include "tile/dropout.cuh"
#include "tile/tail.cuh"

// Standard attention, forward: the textbook's three steps, each a kernel that writes its whole result to memory.
//
//   standard_scores    S = score(Q K^T), -inf where hidden      64 x 64 tiles, one a block
//   standard_softmax   P = dropout(softmax(S)), and lse         one row a warp
//   standard_output    O = P V                                  64 rows a block
//
// Nothing is skipped and nothing is fused: this is the baseline that shows what the seq_q x seq_kv matrices cost.

namespace flash_attention {

using namespace abi;

template <auto config>
__device__ __forceinline__ void standard_scores(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = const ptx::Element<features.dtype>;
  auto& storage = ptx::shared_storage<standard::TileStorage<config.head_dim>>();
  const standard::ScoreTile where = standard::score_tile(args);
  const tile::Sequence sequence = tile::make_sequence<features>(args, where.batch_idx);
  if (where.q_begin >= sequence.len_q || where.kv_begin >= sequence.len_kv) return;

  const auto Q = tile::query_rows<Element, features>(args.Q, sequence, where.head_idx).from(where.q_begin);
  const auto K = tile::key_rows<Element, features>(args.K, sequence, where.head_idx / args.group).from(where.kv_begin);
  float S[4][4]{};
  tile::add_dot_products<config.head_dim>(S, Q, K, storage.product);

  const tile::Score<features> score(args, sequence, where.head_idx);
  const tile::ThreadPlace place;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = where.q_begin + place.row + r, j = where.kv_begin + place.column + c;
      S[r][c] = score.sight.visible(i, j) ? score.capped(S[r][c]) + score.added(i, j) : -tile::infinity;
    }
  }
  standard::ScoreMatrix<float>(args, StandardRegion::S, where.batch_idx, where.head_idx)
      .store(where.q_begin, where.kv_begin, S);
}

/// A block of 8 warps takes 8 rows.
template <auto config>
__device__ __forceinline__ void standard_softmax(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  constexpr int rows_per_block = 8;
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, rows_per_block), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int lane = threadIdx.x % 32, i = block.tile_idx * rows_per_block + threadIdx.x / 32;
  if (i >= sequence.rows_q) return;

  float row_max = -tile::infinity, row_sum = 0, sink = -tile::infinity;
  const float* S = standard::ScoreMatrix<float>(args, StandardRegion::S, block.batch_idx, block.head_idx).row(i);
  const int num_keys = i < sequence.len_q ? sequence.len_kv : 0;
  for (int j = lane; j < num_keys; j += 32) row_max = ptx::max(row_max, S[j]);
  row_max = standard::reduce_warp(row_max, [](float a, float b) { return ptx::max(a, b); });
  if (features.sink && i < sequence.len_q) sink = args.sink[block.head_idx];
  row_max = ptx::max(row_max, sink);
  const float reference = row_max == -tile::infinity ? 0 : row_max;
  for (int j = lane; j < num_keys; j += 32) row_sum += tile::exp(S[j] - reference);
  row_sum = standard::reduce_warp(row_sum, [](float a, float b) { return a + b; }) + tile::exp(sink - reference);

  Element* P = standard::ScoreMatrix<Element>(args, StandardRegion::P, block.batch_idx, block.head_idx).row(i);
  const tile::Dropout dropout(args, block.batch_idx, block.head_idx);
  const float inverse = row_sum == 0 ? 0 : 1 / row_sum;
  for (int j = 2 * lane; j < num_keys; j += 64) {
    float factor[2] = {1, 1};
    if constexpr (features.dropout) dropout.pair(i, j, factor[0], factor[1]);
      // Column j + 1 may be past the last key: inside of the row's padding, and never read.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float p = tile::exp(S[j + e] - reference) * inverse * factor[e];
      const bool is_number = row_sum == row_sum;  // if not, the row is NaN, whatever dropout drops
      P[j + e] = ptx::from_float<Element>(factor[e] == 0 && is_number ? standard::dropped : p);
    }
  }
  if (args.lse != nullptr && lane == 0) {
    float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx);
    lse[i] = row_sum == 0 ? -tile::infinity : row_max + tile::log(row_sum);
  }
}

template <auto config>
__device__ __forceinline__ void standard_output(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  using Element = ptx::Element<features.dtype>;
  auto& storage = ptx::shared_storage<standard::TileStorage<config.head_dim_v>>();
  tile::clear_output_tail<config>(args, threadIdx.x, tile::product_threads);
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.rows_q) return;

  const tile::Visibility<features> sight(args, sequence, block.head_idx);
  const standard::ScoreMatrix<Element> P(args, StandardRegion::P, block.batch_idx, block.head_idx);
  auto V = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  V.count = sequence.visible_kv;
  float O[4][tile::columns_per_thread(config.head_dim_v)]{};
#pragma unroll 1
  for (int kv_begin = 0; kv_begin < V.count && q_begin < sequence.len_q; kv_begin += block_rows) {
    const bool some_hidden = standard::some_hidden(sight, q_begin, kv_begin);
    float weights[4][4];
    P.load(weights, sight, q_begin, kv_begin, some_hidden, features.dropout);
    __syncthreads();  // all threads have read the previous weights
    tile::store_weights_by_column(storage.weights, weights);
    tile::add_weighted_rows<config.head_dim_v>(O, storage.weights, V.from(kv_begin), storage.product,
                                               some_hidden || features.dropout);
  }
  const float one[4] = {1, 1, 1, 1};
  tile::store_rows<config.head_dim_v>(tile::query_rows<Element, features>(args.O, sequence, block.head_idx).from(q_begin),
                                      O, one);
}

}  // namespace flash_attention
