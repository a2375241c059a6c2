#pragma once

#include "backward/dbias.cuh"
#include "backward/delta.cuh"
#include "tangent/portable.cuh"

// Second derivatives on CUDA cores: the gradients of F, the sum of backward's results dQ, dK, dV, dbias and dsink, each
// times the given tangent (docs/numerics.md). Every option but programs that change scores, any GPU, the same bits in
// every run. A dot after a name means its tangent.
//
//   rows: a block owns 64 queries of one head
//     the loop of tangent/portable.cuh:  lse., O. = dF / ddO
//     delta = dot(dO, O) - dlse,  rest = dot(dO, O.) - lse. delta         for the next launches
//   dK, dV: a block owns 64 keys of one key head            dQ: a block owns 64 queries of one head
//     for each query head of the group, each query tile:      for each key tile:
//       W, dS, dS. by the formulas below                        dS, dS. by the formulas below
//       dV += W^T dO                                            dQ += dS K + dS. K.
//       dK += dS^T Q + dS.^T Q.
//
//   P = exp(S - lse),  dP = dO V^T,  dP. = dO V.^T          dP and dP. times dropout's factors
//   W   = P (S. - lse.)                                     times dropout's factors
//   dS. = P (dP - delta)                                    gradient of S.
//   dS  = P (S. (dP - delta) + dP. - lse. dP - rest)        gradient of S
//   through the soft cap c:  dS = c' dS + c'' scale (Q. K^T + Q K.^T) dS.,  dS. = c' dS.

namespace flash_attention {

template <BackwardConfig config>
struct SecondPortable {
  using Backward = BackwardPortable<config>;
  using SharedStorage = typename Backward::SharedStorage;
  using Element = typename Backward::Element;
  static constexpr Features features = config.features;
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v;

  /// One sequence and query head.
  struct Head {
    typename Backward::Head first;  // what first derivatives read
    tile::Tangents<features> tangents;
    const float* lse_tangent;
    const float* rest;

    __device__ __forceinline__ Head(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx)
        : first(args, sequence, head_idx), tangents(args, sequence, head_idx) {
      const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
      lse_tangent = tile::workspace<const float>(args, SecondRegion::lse_tangent) + statistics;
      rest = tile::workspace<const float>(args, SecondRegion::rest) + statistics;
    }
  };

  /// What first derivatives read of a head (backward/dbias.cuh).
  __device__ __forceinline__ static const typename Backward::Head& first_of(const Head& head) { return head.first; }

  /// The gradients of a score tile.
  struct Gradients {
    float W[4][4];           // the weights of dO in dV
    float dS[4][4];          // gradient of the dot product, without the scale, or of the score with its bias
    float dS_tangent[4][4];  // gradient of their tangents

    using At = typename Backward::Gradients::At;

    template <At at = At::dot>
    __device__ __forceinline__ void compute(const Head& head, int q_begin, int kv_begin, bool some_hidden,
                                            SharedStorage& storage) {
      float S[4][4]{}, S_tangent[4][4]{}, dP[4][4]{}, dP_tangent[4][4]{};
      const auto Q = head.first.Q.from(q_begin), dO = head.first.dO.from(q_begin), K = head.first.K.from(kv_begin);
      const tile::Tangents<features>& tangents = head.tangents;
      tile::add_dot_products<dim>(S, Q, K, storage.product);
      if (tangents.has_Q) tile::add_dot_products<dim>(S_tangent, tangents.Q.from(q_begin), K, storage.product);
      if (tangents.has_K) tile::add_dot_products<dim>(S_tangent, Q, tangents.K.from(kv_begin), storage.product);
      tile::add_dot_products<dim_v>(dP, dO, head.first.V.from(kv_begin), storage.product);
      if (tangents.has_V) tile::add_dot_products<dim_v>(dP_tangent, dO, tangents.V.from(kv_begin), storage.product);
      const tile::ThreadPlace place;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = q_begin + place.row + r;
        const bool used = i < head.first.score.sight.len_q;
        const float lse = used ? head.first.lse[i] : -tile::infinity, delta = used ? head.first.delta[i] : 0;
        const float lse_tangent = used ? head.lse_tangent[i] : 0, rest = used ? head.rest[i] : 0;
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const int j = kv_begin + place.column + c;
          float factor[2] = {1, 1};
          if constexpr (features.dropout) head.first.dropout.pair(i, j, factor[0], factor[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &of_dO = W[r][c + e], &of_score = dS[r][c + e], &of_tangent = dS_tangent[r][c + e];
            if (some_hidden && !head.first.score.sight.visible(i, j + e)) {
              of_dO = of_score = of_tangent = tile::hidden();
              continue;
            }
            const tile::ScoreTangent s = tangents.of(head.first.score, S[r][c + e], S_tangent[r][c + e], i, j + e);
            // If lse is -inf, so was every visible score: the row has no probabilities.
            const float p = lse < tile::lowest_lse ? 0 : tile::exp(s.score - lse);
            // Dropped pairs do not count, not even as NaN.
            const bool dropped = features.dropout && factor[e] == 0;
            const float dp = dropped ? 0 : dP[r][c + e] * factor[e];
            const float dp_tangent = dropped ? 0 : dP_tangent[r][c + e] * factor[e];
            of_dO = dropped ? tile::hidden() : p * factor[e] * (s.tangent - lse_tangent);
            of_tangent = p * (dp - delta);
            of_score = p * (s.tangent * (dp - delta) + dp_tangent - lse_tangent * dp - rest);
            if constexpr (at == At::dot && features.softcap) {
              of_score = of_score * s.of_cap + of_tangent * s.curvature * s.raw;
              of_tangent *= s.of_cap;
            }
          }
        }
      }
    }
  };
};

/// Writes each row's statistics for the other launches, and O. and lse. if they are wanted. Clears rows of no sequence.
template <ForwardConfig config>
__device__ __forceinline__ void second_portable_rows(const AttentionArgs& args) {
  using Kernel = TangentPortable<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_tangent_tail<config>(args, threadIdx.x, tile::product_threads);
  tile::clear_gradient_tails<config>(args, threadIdx.x, tile::product_threads);
  if (args.seq_q == 0) return;

  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;

  typename Kernel::State state{};
  Kernel::attend(args, sequence, block.head_idx, q_begin, state, storage);
  Kernel::template finish<false>(args, sequence, block.head_idx, q_begin, state);

  const tile::ThreadPlace place;
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx) + q_begin;
  const auto dO =
      tile::query_rows<const typename Kernel::Element, features>(args.dO, sequence, block.head_idx).from(q_begin);
  const bool by_four = tile::rows_move_by_four(dO);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool used = q_begin + place.row + r < sequence.len_q;
    float of_out = 0, of_tangent = 0;
#pragma unroll
    for (int panel = 0; panel < Kernel::columns / 4; ++panel) {
      const int column = 64 * panel + place.column;
      if (!used || column >= config.head_dim_v) continue;
      const tile::Four d = tile::load_four_of<config.head_dim_v>(dO.row(place.row + r), column, by_four);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        of_out += d[c] * (state.rows.O[r][4 * panel + c] * state.factor[r]);
        of_tangent += d[c] * state.A[r][4 * panel + c];
      }
    }
    of_out = tile::row_total(of_out), of_tangent = tile::row_total(of_tangent);
    if (place.column != 0 || !used) continue;
    const long long row = statistics + place.row + r;
    const float lse_tangent = state.moment[r], delta = of_out - (args.dlse != nullptr ? args.dlse[row] : 0);
    tile::workspace<float>(args, BackwardRegion::delta)[row] = delta;
    tile::workspace<float>(args, SecondRegion::lse_tangent)[row] = lse_tangent;
    tile::workspace<float>(args, SecondRegion::rest)[row] = of_tangent - lse_tangent * delta;
  }
}

template <BackwardConfig config>
__device__ __forceinline__ void second_portable_dkv(const AttentionArgs& args) {
  using Kernel = SecondPortable<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();

  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_rows), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * block_rows;
  if (kv_begin >= sequence.rows_kv) return;

  float dK[4][tile::columns_per_thread(config.head_dim)]{}, dV[4][tile::columns_per_thread(config.head_dim_v)]{};
#pragma unroll 1
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const typename Kernel::Head head(args, sequence, head_idx);
    const auto tiles = head.first.score.sight.template query_tiles<block_rows, block_rows>(kv_begin);
#pragma unroll 1
    for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
      const int q_begin = tile_idx * block_rows;
      if (head.first.skips(q_begin, kv_begin)) continue;
      const bool some_hidden = head.first.some_hidden(q_begin, kv_begin);
      if (some_hidden) ptx::path<"second/portable edge tile">();
      if (!some_hidden) ptx::path<"second/portable inner tile">();
      typename Kernel::Gradients gradients;
      gradients.compute(head, q_begin, kv_begin, some_hidden, storage);
      tile::store_weights_by_row(storage.weights, gradients.W);
      tile::add_weighted_rows<config.head_dim_v>(dV, storage.weights, head.first.dO.from(q_begin), storage.product,
                                                 some_hidden || features.dropout);
      __syncthreads();  // all threads have read W: dS replaces it
      tile::store_weights_by_row(storage.weights, gradients.dS);
      tile::add_weighted_rows<config.head_dim>(dK, storage.weights, head.first.Q.from(q_begin), storage.product,
                                               some_hidden);
      if (!head.tangents.has_Q) continue;
      __syncthreads();  // all threads have read dS: dS. replaces it
      tile::store_weights_by_row(storage.weights, gradients.dS_tangent);
      tile::add_weighted_rows<config.head_dim>(dK, storage.weights, head.tangents.Q.from(q_begin), storage.product,
                                               some_hidden);
    }
  }
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale}, one[4] = {1, 1, 1, 1};
  tile::store_rows<config.head_dim>(tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).from(kv_begin), dK,
                                    scale);
  tile::store_rows<config.head_dim_v>(tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).from(kv_begin),
                                      dV, one);
}

template <BackwardConfig config>
__device__ __forceinline__ void second_portable_dq(const AttentionArgs& args) {
  using Kernel = SecondPortable<config>;
  using Element = typename Kernel::Element;
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();

  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.rows_q) return;

  const typename Kernel::Head head(args, sequence, block.head_idx);
  float dQ[4][tile::columns_per_thread(config.head_dim)]{};
  const auto tiles = head.first.score.sight.template key_tiles<block_rows, block_rows>(q_begin);
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * block_rows;
    if (head.first.skips(q_begin, kv_begin)) continue;
    const bool some_hidden = head.first.some_hidden(q_begin, kv_begin);
    typename Kernel::Gradients gradients;
    gradients.compute(head, q_begin, kv_begin, some_hidden, storage);
    tile::store_weights_by_column(storage.weights, gradients.dS);
    tile::add_weighted_rows<config.head_dim>(dQ, storage.weights, head.first.K.from(kv_begin), storage.product,
                                             some_hidden);
    if (!head.tangents.has_K) continue;
    __syncthreads();  // all threads have read dS: dS. replaces it
    tile::store_weights_by_column(storage.weights, gradients.dS_tangent);
    tile::add_weighted_rows<config.head_dim>(dQ, storage.weights, head.tangents.K.from(kv_begin), storage.product,
                                             some_hidden);
  }
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale};
  tile::store_rows<config.head_dim>(tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).from(q_begin),
                                    dQ, scale);
}

template <BackwardConfig config>
__device__ __forceinline__ void second_dbias(const AttentionArgs& args) {
  bias_gradient<SecondPortable<config>>(args);
}

/// dF / dsink = - sum over rows of exp(sink - lse) (sink. delta + rest).
template <BackwardConfig config>
__device__ __forceinline__ void second_dsink(const AttentionArgs& args) {
  const auto* delta = tile::workspace<const float>(args, BackwardRegion::delta);
  const auto* rest = tile::workspace<const float>(args, SecondRegion::rest);
  const float tangent = args.sink_tangent != nullptr ? args.sink_tangent[blockIdx.x] : 0;
  sum_over_rows<config>(args, [&](long long row) { return tangent * delta[row] + rest[row]; });
}

}  // namespace flash_attention
