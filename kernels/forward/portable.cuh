#pragma once

#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "tile/dropout.cuh"
#include "tile/largest_score.cuh"
#include "tile/product.cuh"
#include "tile/score.cuh"
#include "tile/tail.cuh"

// Attention forward on CUDA cores: every option, every dtype, every head_dim, any GPU. It takes what the faster kernels
// refuse.
//
// One block of 256 threads computes 64 queries of one head:
//
//   for each tile of 64 keys that the queries see:
//     S = Q K^T                            chunks of 32 of head_dim through shared memory
//     S = score(S), hidden where masked
//     P = exp(S - max so far)              O and the sums are scaled down if the maximum grew
//     O = O + P V                          chunks of 16 keys through shared memory
//   O = O / sum,  lse = max + log(sum)

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct ForwardPortable {
  static constexpr Features features = config.features;
  static constexpr int dim = config.head_dim, dim_v = config.head_dim_v;
  static constexpr int columns = tile::columns_per_thread(dim_v);
  using Element = ptx::Element<features.dtype>;
  static_assert(config.block_q == tile::block_rows && config.block_kv == tile::block_rows && config.num_warps == 8);

  struct SharedStorage {
    tile::ProductStorage<dim_v> product;
    tile::WeightTile P;
  };

  /// This thread's part of the running softmax and output.
  struct State {
    float row_max[4];
    float row_sum[4];
    float row_moment[features.entropy ? 4 : 1];  // sum of exp(score - row_max) (score - row_max)
    float O[4][columns];
  };

  /// Turns dot products into scores, and marks hidden ones unless the whole tile is visible.
  template <typename Scaled>
  __device__ static void score_tile(float (&S)[4][4], const tile::Score<features>& score, int q_begin, int kv_begin,
                                    bool some_hidden, Scaled scaled) {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = q_begin + place.row + r, j = kv_begin + place.column + c;
        if (i >= score.sight.len_q || (some_hidden && !score.sight.visible(i, j))) {
          S[r][c] = tile::hidden();
        } else {
          S[r][c] = score.full(scaled(S[r][c], r, c, j), i, j);
          if (features.score_program && S[r][c] == -tile::infinity) S[r][c] = tile::hidden();
        }
      }
    }
  }

  /// S = exp(S - row_max). Rescales the state to the new maximum and adds the new terms to the sums.
  __device__ static void softmax_tile(float (&S)[4][4], State& state) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float tile_max = -tile::infinity;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!tile::is_hidden(S[r][c])) tile_max = ptx::max(tile_max, S[r][c]);
      }
      const float new_max = ptx::max(state.row_max[r], tile::row_maximum(tile_max));
      // If all scores of a row were -inf, subtract 0: exp(-inf - 0) = 0, without NaN.
      const float reference = new_max == -tile::infinity ? 0 : new_max;
      const float old_max = state.row_max[r], rescale = tile::exp(old_max - reference);
      state.row_max[r] = new_max;
      float total = 0, moment = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (tile::is_hidden(S[r][c])) continue;
        const float below = S[r][c] - reference;
        S[r][c] = tile::exp(below);
        total += S[r][c];
        if (features.entropy && below != -tile::infinity) moment += S[r][c] * below;
      }
      if constexpr (features.entropy) {  // terms relative to the old maximum become relative to the new one
        const float step = old_max == -tile::infinity ? 0 : old_max - reference;
        state.row_moment[r] = (state.row_moment[r] + state.row_sum[r] * step) * rescale + moment;
      }
      state.row_sum[r] = state.row_sum[r] * rescale + total;
#pragma unroll
      for (int n = 0; n < columns; ++n) state.O[r][n] *= rescale;
    }
  }

  /// Multiplies a probability by the scale of its value, if values are codes with scales.
  template <typename ValueScale>
  __device__ static void scale_tile(float (&P)[4][4], int kv_begin, ValueScale value_scale) {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!tile::is_hidden(P[r][c])) P[r][c] *= value_scale(kv_begin + place.column + c);
      }
    }
  }

  /// A dropped probability is marked as hidden: its value is skipped, so a NaN there does not reach the output.
  __device__ static void drop_tile(float (&P)[4][4], const tile::Dropout& dropout, int q_begin, int kv_begin) {
    const tile::ThreadPlace place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        float first, second;
        dropout.pair(q_begin + place.row + r, kv_begin + place.column + c, first, second);
        if (!tile::is_hidden(P[r][c])) P[r][c] = first == 0 ? tile::hidden() : P[r][c] * first;
        if (!tile::is_hidden(P[r][c + 1])) P[r][c + 1] = second == 0 ? tile::hidden() : P[r][c + 1] * second;
      }
    }
  }

  /// From running sums to rows: factors, with which O becomes out, and the maximum and sum of which lse is made, the sink
  /// included. Writes lse, unless another pass has.
  template <bool writes_lse = true>
  __device__ static void close_rows(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int q_begin,
                                    State& state, float (&factor)[4]) {
    const tile::ThreadPlace place;
    float largest_score = -tile::infinity;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = q_begin + place.row + r;
      float sum = tile::row_total(state.row_sum[r]);
      float row_max = state.row_max[r], above = 0;  // lse minus the largest score, without log(sum)
      const float largest = sum == sum ? row_max : sum, keys_sum = sum;
      if (features.sink && i < sequence.len_q) {
        const float sink = args.sink[head_idx];
        const float new_max = ptx::max(row_max, sink);
        const float reference = new_max == -tile::infinity ? 0 : new_max;
        // The output was summed relative to row_max, so the divisor must be, too.
        factor[r] = 1 / (sum + tile::exp(sink - row_max));
        if (sum == 0) factor[r] = 0;
        if (sum != 0 && factor[r] == 0) factor[r] = tile::smallest;  // a row that has keys, but the sink dominates
        sum = sum * tile::exp(row_max - reference) + tile::exp(sink - reference);
        above = new_max - row_max;
        row_max = new_max;
      } else {
        factor[r] = sum == 0 ? 0 : 1 / sum;
      }
      if (factor[r] == 0) {  // a row without keys is zero, whatever the sum holds
#pragma unroll
        for (float& value : state.O[r]) value = 0;
      }
      if constexpr (features.kv_scales)
        factor[r] *= tile::head_scale<features>(args.V_scale, sequence.batch_idx, head_idx / args.group);
      if (writes_lse && args.lse != nullptr && i < sequence.rows_q && place.column == 0) {
        float* lse = args.lse + tile::statistics_offset<features>(args, sequence, head_idx);
        lse[i] = sum == 0 ? -tile::infinity : row_max + tile::log(sum);
      }
      if constexpr (features.entropy) {
        const float moment = tile::row_total(state.row_moment[r]);
        const float entropy = factor[r] * (keys_sum * (above + tile::log(sum)) - moment);
        if (i < sequence.rows_q && place.column == 0)
          args.entropy[tile::statistics_offset<features>(args, sequence, head_idx) + i] = keys_sum == 0 ? 0 : entropy;
      }
      if (i < sequence.len_q) largest_score = tile::larger_or_nan(largest, largest_score);
      state.row_max[r] = row_max, state.row_sum[r] = sum;
    }
    if constexpr (features.max_logit) {
      if (place.column == 0) tile::raise_largest(args, sequence.batch_idx, head_idx, largest_score);
    }
  }

  /// Divides by the sums, the sink included, and writes O and lse.
  __device__ static void finish(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int q_begin,
                                State& state) {
    float factor[4];
    close_rows(args, sequence, head_idx, q_begin, state, factor);
    const auto O = tile::query_rows<Element, features>(args.O, sequence, head_idx).from(q_begin);
    tile::store_rows<dim_v>(O, state.O, factor);
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void forward_portable(const AttentionArgs& args) {
  using Kernel = ForwardPortable<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, tile::product_threads);

  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;

  const int kv_head_idx = block.head_idx / args.group;
  using Query = const tile::Stored<query_type(features)>;
  const auto Q = tile::query_rows<Query, features>(args.Q, sequence, block.head_idx).from(q_begin);
  const auto K = tile::keys_of<features>(args, sequence, kv_head_idx);
  const auto V = tile::values_of<features>(args, sequence, kv_head_idx);
  const auto scale_of = [&](const ScaleView& scales) {
    return [&](int j) { return tile::token_scale<features>(args, scales, sequence, kv_head_idx, j); };
  };

  const tile::Score<features> score(args, sequence, block.head_idx);
  const tile::Dropout dropout(args, block.batch_idx, block.head_idx);
  typename Kernel::State state{};
  for (float& row_max : state.row_max) row_max = -tile::infinity;

  const auto tiles = score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * config.block_kv;
    if (score.sight.template masks_hide<config.block_q, config.block_kv>(q_begin, kv_begin)) continue;
    const bool some_hidden = !score.sight.template all_visible<config.block_q, config.block_kv>(q_begin, kv_begin);
    if (some_hidden) ptx::path<"forward/portable edge tile">();
    if (!some_hidden) ptx::path<"forward/portable inner tile">();
    float S[4][4]{};
    float own[features.latent ? 4 : 1][4]{};  // for the columns of a latent key that are not part of its value
    if constexpr (features.latent) {
      auto own_Q = Q;
      own_Q.data += config.head_dim_v;
      tile::add_dot_products<config.head_dim_v>(S, Q, V.from(kv_begin), storage.product);
      tile::add_dot_products<config.head_dim - config.head_dim_v>(own, own_Q, K.from(kv_begin), storage.product);
    } else {
      tile::add_dot_products<config.head_dim>(S, Q, K.from(kv_begin), storage.product);
    }
    Kernel::score_tile(S, score, q_begin, kv_begin, some_hidden, [&](float dot, int r, int c, int j) {
      if constexpr (config.features.latent) {
        return tile::latent_dot<config.features>(args, sequence, kv_head_idx, j, dot, own[r][c]);
      } else if constexpr (config.features.token_scales) {
        return dot * tile::token_scale<config.features>(args, args.K_scale, sequence, kv_head_idx, j);
      } else {
        return dot;
      }
    });
    Kernel::softmax_tile(S, state);
    if constexpr (features.dropout) Kernel::drop_tile(S, dropout, q_begin, kv_begin);
    if constexpr (features.token_scales) Kernel::scale_tile(S, kv_begin, scale_of(args.V_scale));
    tile::store_weights_by_column(storage.P, S);
    tile::add_weighted_rows<config.head_dim_v>(state.O, storage.P, V.from(kv_begin), storage.product,
                                               some_hidden || features.dropout || features.score_program);
  }
  Kernel::finish(args, sequence, block.head_idx, q_begin, state);
}

}  // namespace flash_attention
