#pragma once

#include "tile/dropout.cuh"
#include "tile/key_source.cuh"
#include "tile/score.cuh"
#include "tile/warp_row.cuh"

// Computes a row of O by one warp, without multiplying anything hidden or dropped. It repairs rows that 0 * NaN has reached
// in a tensor-core product (tile/warp_row.cuh).

namespace flash_attention {

using namespace abi;

/// O of query i. The query is in use, and its log-sum-exp is known.
template <ForwardConfig config>
__device__ __forceinline__ tile::WarpRow<config.head_dim_v> repaired_output(const AttentionArgs& args,
                                                                            const tile::Sequence& sequence, int head_idx,
                                                                            int i, float lse) {
  constexpr Features features = config.features;
  using Query = const tile::Stored<query_type(features)>;
  const int lane = threadIdx.x % 32, kv_head_idx = head_idx / args.group;
  const tile::Score<features> score(args, sequence, head_idx);
  const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
  const auto Q = tile::query_rows<Query, features>(args.Q, sequence, head_idx);
  const auto K = tile::keys_of<features>(args, sequence, kv_head_idx);
  const auto V = tile::values_of<features>(args, sequence, kv_head_idx);
  const tile::KeyRange range = score.sight.keys_of(i);
  tile::WarpRow<config.head_dim_v> sum;
  if (lse == -tile::infinity) return sum;  // no score is above -inf, and -inf - lse would be NaN
  if (features.dropout && lse != lse) {    // the row is NaN, even if dropout drops the NaN scores
#pragma unroll
    for (float& element : sum.sum) element = lse;
  }
  // Normalised by the sum that is computed here, not by lse: lse is rounded to 2^-24 of its size, and was computed from
  // other dot products. (Of 8-bit products tensor cores keep 14 bits.)
  float max = features.sink ? args.sink[head_idx] : -tile::infinity, weights = 0;
  // Short sums first, then their sum: rows of float32 may be long.
  tile::WarpRow<config.head_dim_v> part;
  float part_weights = 0;
  const auto add_part = [&] {
#pragma unroll
    for (int n = 0; n < part.parts; ++n) sum.sum[n] += part.sum[n];
    weights += part_weights;
    part = {}, part_weights = 0;
  };
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {  // first find the largest score, then add up
    if (features.sink && step == 1) weights = tile::exp(args.sink[head_idx] - max);
#pragma unroll 1
    for (int j = range.begin; j < range.end; ++j) {
      if (j % 64 == 0) add_part();
      if (!score.sight.visible(range, i, j)) continue;
      float dot = 0;
      if constexpr (features.latent) {
        dot = tile::latent_dot<features>(
            args, sequence, kv_head_idx, j, tile::warp_dot<config.head_dim_v>(Q.row(i), V.row(j), lane),
            tile::warp_dot<config.head_dim - config.head_dim_v>(Q.row(i) + config.head_dim_v, K.row(j), lane));
      } else {
        dot = tile::warp_dot<config.head_dim>(Q.row(i), K.row(j), lane);
      }
      if constexpr (features.token_scales && !features.latent)
        dot *= tile::token_scale<features>(args, args.K_scale, sequence, kv_head_idx, j);
      const float full = score.full(dot, i, j);
      if (step == 0) {
        max = ptx::max(max, full);
        continue;
      }
      float p = tile::exp(full - max);
      part_weights += p;
      if (features.dropout && !dropout.keeps(i, j)) continue;
      if (features.score_program && p == 0) continue;  // the program gave -inf
      if constexpr (features.token_scales) {
        p *= tile::token_scale<features>(args, args.V_scale, sequence, kv_head_idx, j);
      } else if constexpr (features.kv_scales) {
        p *= tile::head_scale<features>(args.V_scale, sequence.batch_idx, kv_head_idx);
      }
      part.add(features.dropout ? p * args.keep_scale : p, V.row(j), lane);
    }
  }
  add_part();
#pragma unroll
  for (float& element : sum.sum) element /= weights;
  return sum;
}

/// Returns the log-sum-exp of query i. If it is NaN because an Inf was split in two parts, it is computed and written
/// again.
template <ForwardConfig config>
__device__ __forceinline__ float repair_lse(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int i,
                                            float lse) {
  constexpr Features features = config.features;
  if (lse == lse || i >= sequence.len_q) return lse;
  using Element = const ptx::Element<features.dtype>;
  const int lane = threadIdx.x % 32;
  const tile::Score<features> score(args, sequence, head_idx);
  const auto Q = tile::query_rows<Element, features>(args.Q, sequence, head_idx);
  const auto K = tile::key_source<Element, features>(args, args.K, sequence, head_idx / args.group);
  const tile::KeyRange range = score.sight.keys_of(i);
  float max = features.sink ? args.sink[head_idx] : -tile::infinity, sum = max == -tile::infinity ? 0 : 1;
#pragma unroll 1
  for (int j = range.begin; j < range.end; ++j) {
    if (!score.sight.visible(range, i, j)) continue;
    const float s = score.full(tile::warp_dot<config.head_dim>(Q.row(i), K.row(j), lane), i, j);
    if (s == -tile::infinity) continue;
    const float new_max = ptx::max(max, s);
    sum = sum * (max == -tile::infinity ? 0 : tile::exp(max - new_max)) + tile::exp(s - new_max);
    max = new_max;
  }
  lse = sum == 0 ? -tile::infinity : max + tile::log(sum);
  if (args.lse != nullptr && lane == 0) args.lse[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse;
  return lse;
}

/// Writes repaired_output to a row of a swizzled tile. Does nothing for a query that is not in use.
template <ForwardConfig config, typename Tile>
__device__ __forceinline__ void repair_output(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                              int i, float lse, unsigned tile_address, int row) {
  if (i >= sequence.len_q) return;
  repaired_output<config>(args, sequence, head_idx, i, lse)
      .template store<config.features.dtype, Tile>(tile_address, row, threadIdx.x % 32);
}

}  // namespace flash_attention
