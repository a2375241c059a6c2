#pragma once

#include "tile/dropout.cuh"
#include "tile/tangents.cuh"
#include "tile/warp_row.cuh"

// Computes a row of O and O. by one warp, without multiplying anything hidden or dropped. It repairs rows that 0 * NaN has
// reached in a tensor-core product (tile/warp_row.cuh), and those whose P S. is too large for 16 bits.

namespace flash_attention {

using namespace abi;

template <int dim_v>
struct TangentRow {
  tile::WarpRow<dim_v> O, O_tangent;
};

/// The row of query i, which is in use, and whose log-sum-exp is known.
template <ForwardConfig config>
__device__ __forceinline__ TangentRow<config.head_dim_v> repaired_tangent(const AttentionArgs& args,
                                                                          const tile::Sequence& sequence, int head_idx,
                                                                          int i, float lse) {
  constexpr Features features = config.features;
  using Element = const ptx::Element<features.dtype>;
  TangentRow<config.head_dim_v> row;
  if (lse == -tile::infinity) return row;  // no score is above -inf
  if (features.dropout && lse != lse) {    // the row is NaN, even if dropout drops the NaN scores
#pragma unroll
    for (int n = 0; n < row.O.parts; ++n) row.O.sum[n] = row.O_tangent.sum[n] = lse;
    return row;
  }
  const int lane = threadIdx.x % 32, kv_head_idx = head_idx / args.group;
  const tile::Score<features> score(args, sequence, head_idx);
  const tile::Tangents<features> tangents(args, sequence, head_idx);
  const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
  const auto Q = tile::query_rows<Element, features>(args.Q, sequence, head_idx);
  const auto K = tile::key_rows<Element, features>(args.K, sequence, kv_head_idx);
  const auto V = tile::key_rows<Element, features>(args.V, sequence, kv_head_idx);
  const tile::KeyRange range = score.sight.keys_of(i);
  float sum = 0, moment = 0, sink_share = 0;
  if constexpr (features.sink) sink_share = tile::exp(args.sink[head_idx] - lse);
#pragma unroll 1
  for (int j = range.begin; j < range.end; ++j) {
    if (!score.sight.visible(range, i, j)) continue;
    float dot_tangent = 0;
    if (tangents.has_Q) dot_tangent += tile::warp_dot<config.head_dim>(tangents.Q.row(i), K.row(j), lane);
    if (tangents.has_K) dot_tangent += tile::warp_dot<config.head_dim>(Q.row(i), tangents.K.row(j), lane);
    const tile::ScoreTangent s =
        tangents.of(score, tile::warp_dot<config.head_dim>(Q.row(i), K.row(j), lane), dot_tangent, i, j);
    if (features.score_program && s.score == -tile::infinity) continue;
    const float p = tile::exp(s.score - lse), p_tangent = p == 0 ? 0 : p * s.tangent;
    sum += p, moment += p_tangent;
    if (features.dropout && !dropout.keeps(i, j)) continue;
    const float keep = features.dropout ? args.keep_scale : 1;
    row.O.add(keep * p, V.row(j), lane);
    row.O_tangent.add(keep * p_tangent, V.row(j), lane);
    if (tangents.has_V) row.O_tangent.add(keep * p, tangents.V.row(j), lane);
  }
  // Divides by the sum that is computed here, because lse is rounded to 2^-24 of its size.
  const float factor = 1 / (sum + sink_share);
  float lse_tangent = moment * factor;
  if (features.sink && args.sink_tangent != nullptr) lse_tangent += sink_share * factor * args.sink_tangent[head_idx];
#pragma unroll
  for (int n = 0; n < row.O.parts; ++n) {
    row.O.sum[n] *= factor;
    row.O_tangent.sum[n] = row.O_tangent.sum[n] * factor - lse_tangent * row.O.sum[n];
  }
  return row;
}

}  // namespace flash_attention
