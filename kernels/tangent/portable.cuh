#pragma once

#include "forward/portable.cuh"
#include "tile/tangents.cuh"
#include "tile/workspace.cuh"

// Forward mode on CUDA cores: out, lse and their tangents in one pass, every option, every dtype, every head_dim, any GPU.
//
// One block of 256 threads computes 64 queries of one head. It is forward/portable with a second sum next to each sum; a
// dot after a name means its tangent:
//
//   for each tile of 64 keys that the queries see:
//     S = Q K^T,  S. = Q. K^T + Q K.^T      through the score's options: tile/tangents.cuh
//     P = exp(S - max so far)               O, A and the sums are scaled down if the maximum grew
//     moment = moment + sum of P S.
//     O = O + P V
//     A = A + (P S.) V + P V.
//   O = O / sum,  lse. = moment / sum,  O. = A / sum - lse. O
//
// Second derivatives begin with the same loop. They keep three numbers of each row instead of O and lse.

namespace flash_attention {

template <ForwardConfig config>
struct TangentPortable {
  using Forward = ForwardPortable<config>;
  using SharedStorage = typename Forward::SharedStorage;
  using Element = typename Forward::Element;
  static constexpr Features features = config.features;
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v, columns = Forward::columns;

  /// This thread's part.
  struct State {
    typename Forward::State rows;
    float moment[4];      // at the end lse.
    float A[4][columns];  // at the end O.
    float factor[4];      // at the end: out = factor * O
  };

  /// Turns dot products and their tangents into scores and their tangents. Hidden ones are marked in both.
  __device__ static void score_tile(float (&S)[4][4], float (&tangent)[4][4], const tile::Score<features>& score,
                                    const tile::Tangents<features>& tangents, int q_begin, int kv_begin,
                                    bool some_hidden) {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = q_begin + place.row + r, j = kv_begin + place.column + c;
        bool hidden = i >= score.sight.len_q || (some_hidden && !score.sight.visible(i, j));
        if (!hidden) {
          const tile::ScoreTangent pair = tangents.of(score, S[r][c], tangent[r][c], i, j);
          S[r][c] = pair.score, tangent[r][c] = pair.tangent;
          hidden = features.score_program && pair.score == -tile::infinity;
        }
        if (hidden) S[r][c] = tangent[r][c] = tile::hidden();
      }
    }
  }

  /// S becomes P, and its tangent P S., which is added to the moments. Sums relative to the old maximum are rescaled.
  __device__ static void softmax_tile(float (&S)[4][4], float (&tangent)[4][4], State& state) {
    float old_max[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) old_max[r] = state.rows.row_max[r];
    Forward::softmax_tile(S, state.rows);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float new_max = state.rows.row_max[r];
      const float rescale = tile::exp(old_max[r] - (new_max == -tile::infinity ? 0 : new_max));
      float moment = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (tile::is_hidden(S[r][c])) continue;
        tangent[r][c] = S[r][c] == 0 ? 0 : S[r][c] * tangent[r][c];
        moment += tangent[r][c];
      }
      state.moment[r] = state.moment[r] * rescale + moment;
#pragma unroll
      for (float& value : state.A[r]) value *= rescale;
    }
  }

  /// Applies dropout to P and P S. alike.
  __device__ static void drop_tile(float (&P)[4][4], float (&tangent)[4][4], const tile::Dropout& dropout, int q_begin,
                                   int kv_begin) {
    Forward::drop_tile(P, dropout, q_begin, kv_begin);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        tangent[r][c] = tile::is_hidden(P[r][c]) ? tile::hidden() : tangent[r][c] * dropout.keep_scale;
    }
  }

  /// The loop over the keys that the queries [q_begin, q_begin + block_q) see.
  __device__ static void attend(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int q_begin,
                                State& state, SharedStorage& storage) {
    using Rows = tile::Rows<const Element>;
    const Rows Q = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).from(q_begin);
    const auto keys = [&](const TensorView& view) {
      Rows rows = tile::key_rows<const Element, features>(view, sequence, head_idx / args.group);
      rows.count = sequence.visible_kv;
      return rows;
    };
    const Rows K = keys(args.K), V = keys(args.V);
    const tile::Score<features> score(args, sequence, head_idx);
    const tile::Tangents<features> tangents(args, sequence, head_idx);
    const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
    for (float& row_max : state.rows.row_max) row_max = -tile::infinity;

    const auto tiles = score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
#pragma unroll 1
    for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
      const int kv_begin = tile_idx * config.block_kv;
      if (score.sight.template masks_hide<config.block_q, config.block_kv>(q_begin, kv_begin)) continue;
      const bool some_hidden = !score.sight.template all_visible<config.block_q, config.block_kv>(q_begin, kv_begin);
      if (some_hidden) ptx::path<"tangent/portable edge tile">();
      if (!some_hidden) ptx::path<"tangent/portable inner tile">();
      float S[4][4]{}, tangent[4][4]{};
      tile::add_dot_products<dim>(S, Q, K.from(kv_begin), storage.product);
      if (tangents.has_Q)
        tile::add_dot_products<dim>(tangent, tangents.Q.from(q_begin), K.from(kv_begin), storage.product);
      if (tangents.has_K) tile::add_dot_products<dim>(tangent, Q, tangents.K.from(kv_begin), storage.product);
      score_tile(S, tangent, score, tangents, q_begin, kv_begin, some_hidden);
      softmax_tile(S, tangent, state);
      if constexpr (features.dropout) drop_tile(S, tangent, dropout, q_begin, kv_begin);
      const bool skips = some_hidden || features.dropout || features.score_program;
      tile::store_weights_by_column(storage.P, S);
      tile::add_weighted_rows<dim_v>(state.rows.O, storage.P, V.from(kv_begin), storage.product, skips);
      if (tangents.has_V)
        tile::add_weighted_rows<dim_v>(state.A, storage.P, tangents.V.from(kv_begin), storage.product, skips);
      __syncthreads();  // all threads have read P: P S. replaces it
      tile::store_weights_by_column(storage.P, tangent);
      tile::add_weighted_rows<dim_v>(state.A, storage.P, V.from(kv_begin), storage.product, skips);
    }
  }

  /// Turns sums into lse. and O., and computes the factors of out. `writes_lse`: lse is a result of this pass.
  template <bool writes_lse>
  __device__ static void finish(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int q_begin,
                                State& state) {
    Forward::template close_rows<writes_lse>(args, sequence, head_idx, q_begin, state.rows, state.factor);
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = q_begin + place.row + r;
      const float moment = tile::row_total(state.moment[r]);
      float& lse_tangent = state.moment[r];
      lse_tangent = state.factor[r] == 0 ? 0 : moment * state.factor[r];
      if constexpr (features.sink) {
        if (args.sink_tangent != nullptr && state.rows.row_sum[r] != 0) {
          const float share = tile::exp(args.sink[head_idx] - state.rows.row_max[r]) / state.rows.row_sum[r];
          lse_tangent += share * args.sink_tangent[head_idx];
        }
      }
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        const float a = state.factor[r] == 0 ? 0 : state.A[r][n] * state.factor[r];
        state.A[r][n] = a - lse_tangent * (state.rows.O[r][n] * state.factor[r]);
      }
      if (args.lse_tangent != nullptr && place.column == 0 && i < sequence.rows_q)
        args.lse_tangent[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse_tangent;
    }
    if (args.O_tangent == nullptr) return;
    const float one[4] = {1, 1, 1, 1};
    const TensorView view = tile::tangent_view(args.O, args.O_tangent);
    tile::store_rows<dim_v>(tile::query_rows<Element, features>(view, sequence, head_idx).from(q_begin), state.A, one);
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void tangent_portable(const AttentionArgs& args) {
  using Kernel = TangentPortable<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, tile::product_threads);
  tile::clear_tangent_tail<config>(args, threadIdx.x, tile::product_threads);

  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;

  typename Kernel::State state{};
  Kernel::attend(args, sequence, block.head_idx, q_begin, state, storage);
  Kernel::template finish<true>(args, sequence, block.head_idx, q_begin, state);
  const auto O = tile::query_rows<typename Kernel::Element, features>(args.O, sequence, block.head_idx).from(q_begin);
  tile::store_rows<config.head_dim_v>(O, state.rows.O, state.factor);
}

}  // namespace flash_attention
