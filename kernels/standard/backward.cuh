#pragma once

#include "standard/forward.cuh"
#include "tile/workspace.cuh"

// Standard attention, backward. standard_scores computes S, backward_delta computes delta; then
//
//   standard_dp                 dP = dO V^T                          64 x 64 tiles, one a block
//   standard_softmax_backward   P = dropout(exp(S - lse)),           one row a warp
//                               dS = P * (dP - delta)
//   standard_dv                 dV = P^T dO                          64 keys of a key head a block
//   standard_dk                 dK = scale * dS^T Q                  64 keys of a key head a block
//   standard_dq                 dQ = scale * dS K                    64 queries a block

namespace flash_attention {

using namespace abi;

template <BackwardConfig config>
__device__ __forceinline__ void standard_dp(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = const ptx::Element<features.dtype>;
  auto& storage = ptx::shared_storage<standard::TileStorage<config.head_dim_v>>();
  const standard::ScoreTile where = standard::score_tile(args);
  const tile::Sequence sequence = tile::make_sequence<features>(args, where.batch_idx);
  if (where.q_begin >= sequence.len_q || where.kv_begin >= sequence.len_kv) return;

  const auto dO = tile::query_rows<Element, features>(args.dO, sequence, where.head_idx).from(where.q_begin);
  const auto V = tile::key_rows<Element, features>(args.V, sequence, where.head_idx / args.group).from(where.kv_begin);
  float dP[4][4]{};
  tile::add_dot_products<config.head_dim_v>(dP, dO, V, storage.product);
  standard::ScoreMatrix<float>(args, StandardRegion::dP, where.batch_idx, where.head_idx)
      .store(where.q_begin, where.kv_begin, dP);
}

/// A block of 8 warps takes 8 rows.
template <BackwardConfig config>
__device__ __forceinline__ void standard_softmax_backward(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  using standard::ScoreMatrix;
  constexpr int rows_per_block = 8;
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, rows_per_block), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int lane = threadIdx.x % 32, i = block.tile_idx * rows_per_block + threadIdx.x / 32;
  if (i >= sequence.len_q) return;

  const tile::Score<features> score(args, sequence, block.head_idx);
  const tile::Dropout dropout(args, block.batch_idx, block.head_idx);
  const float* S = ScoreMatrix<float>(args, StandardRegion::S, block.batch_idx, block.head_idx).row(i);
  const float* dP = ScoreMatrix<float>(args, StandardRegion::dP, block.batch_idx, block.head_idx).row(i);
  Element* P = ScoreMatrix<Element>(args, StandardRegion::P, block.batch_idx, block.head_idx).row(i);
  Element* dS = ScoreMatrix<Element>(args, StandardRegion::dS, block.batch_idx, block.head_idx).row(i);
  const long long statistic = tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
  const float lse = args.lse[statistic];
  const float delta = tile::workspace<const float>(args, BackwardRegion::delta)[statistic];
  for (int j = 2 * lane; j < sequence.len_kv; j += 64) {
    float factor[2] = {1, 1};
    if constexpr (features.dropout) dropout.pair(i, j, factor[0], factor[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float p = 0, ds = 0;
      if (score.sight.visible(i, j + e) && !(lse < tile::lowest_lse)) {
        p = tile::exp(S[j + e] - lse);
        ds = p * ((factor[e] == 0 ? 0 : dP[j + e] * factor[e]) - delta);
        if constexpr (features.softcap) {
          const float tanh = (S[j + e] - score.added(i, j + e)) / score.softcap;
          ds *= 1.0f - tanh * tanh;
        }
      }
      P[j + e] = ptx::from_float<Element>(factor[e] == 0 ? standard::dropped : p * factor[e]);
      dS[j + e] = ptx::from_float<Element>(ds);
    }
  }
}

/// result = sum over the queries of the group of weights^T rows, for 64 keys: dV from P and dO, dK from dS and Q.
template <BackwardConfig config, int dim>
__device__ __forceinline__ void standard_key_gradient(const AttentionArgs& args, StandardRegion matrix,
                                                      const TensorView& queries, const TensorView& result, float factor) {
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  using Element = ptx::Element<features.dtype>;
  auto& storage = ptx::shared_storage<standard::TileStorage<dim>>();
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_rows), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * block_rows;
  if (kv_begin >= sequence.rows_kv) return;

  float total[4][tile::columns_per_thread(dim)]{};
  const bool skips_dropped = features.dropout && matrix == StandardRegion::P;
  const int num_queries = kv_begin < sequence.visible_kv ? sequence.len_q : 0;
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const tile::Visibility<features> sight(args, sequence, head_idx);
    const standard::ScoreMatrix<Element> weights_of_head(args, matrix, block.batch_idx, head_idx);
    auto rows = tile::query_rows<const Element, features>(queries, sequence, head_idx);
    rows.count = sequence.len_q;
#pragma unroll 1
    for (int q_begin = 0; q_begin < num_queries; q_begin += block_rows) {
      const bool some_hidden = standard::some_hidden(sight, q_begin, kv_begin);
      float weights[4][4];
      weights_of_head.load(weights, sight, q_begin, kv_begin, some_hidden, skips_dropped);
      __syncthreads();  // all threads have read the previous weights
      tile::store_weights_by_row(storage.weights, weights);
      tile::add_weighted_rows<dim>(total, storage.weights, rows.from(q_begin), storage.product,
                                   some_hidden || skips_dropped);
    }
  }
  const float factors[4] = {factor, factor, factor, factor};
  tile::store_rows<dim>(tile::key_rows<Element, features>(result, sequence, block.head_idx).from(kv_begin), total, factors);
}

template <BackwardConfig config>
__device__ __forceinline__ void standard_dv(const AttentionArgs& args) {
  standard_key_gradient<config, config.head_dim_v>(args, StandardRegion::P, args.dO, args.dV, 1);
}

template <BackwardConfig config>
__device__ __forceinline__ void standard_dk(const AttentionArgs& args) {
  standard_key_gradient<config, config.head_dim>(args, StandardRegion::dS, args.Q, args.dK, args.scale);
}

template <BackwardConfig config>
__device__ __forceinline__ void standard_dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  using Element = ptx::Element<features.dtype>;
  auto& storage = ptx::shared_storage<standard::TileStorage<config.head_dim>>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.rows_q) return;

  const tile::Visibility<features> sight(args, sequence, block.head_idx);
  const standard::ScoreMatrix<Element> dS(args, StandardRegion::dS, block.batch_idx, block.head_idx);
  auto K = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  K.count = sequence.visible_kv;
  float dQ[4][tile::columns_per_thread(config.head_dim)]{};
#pragma unroll 1
  for (int kv_begin = 0; kv_begin < K.count && q_begin < sequence.len_q; kv_begin += block_rows) {
    const bool some_hidden = standard::some_hidden(sight, q_begin, kv_begin);
    float weights[4][4];
    dS.load(weights, sight, q_begin, kv_begin, some_hidden, false);
    __syncthreads();  // all threads have read the previous weights
    tile::store_weights_by_column(storage.weights, weights);
    tile::add_weighted_rows<config.head_dim>(dQ, storage.weights, K.from(kv_begin), storage.product, some_hidden);
  }
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale};
  tile::store_rows<config.head_dim>(tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin),
                                    dQ, scale);
}

}  // namespace flash_attention
