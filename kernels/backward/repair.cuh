#pragma once

#include "tile/dropout.cuh"
#include "tile/score.cuh"
#include "tile/warp_row.cuh"
#include "tile/workspace.cuh"

// Gradients of single rows, computed by one warp that multiplies nothing hidden or dropped: for rows that 0 * NaN has
// reached in a tensor-core product (tile/warp_row.cuh).

namespace flash_attention {

using namespace abi;

/// One query head.
template <BackwardConfig config>
struct RepairHead {
  static constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  using Rows = decltype(tile::query_rows<const Element, features>(AttentionArgs{}, TensorView{}, tile::Sequence{}, 0));
  const AttentionArgs& args;
  Rows Q, dO;
  tile::Score<features> score;
  tile::Dropout dropout;
  const float* lse;
  const float* delta;
  float delta_scale;  // of the stored delta

  /// row_delta: delta of the sequence's first row.
  __device__ __forceinline__ RepairHead(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                        const float* row_delta, float scale_of_delta = 1)
      : args(args),
        Q(tile::query_rows<const Element, features>(args, args.Q, sequence, head_idx)),
        dO(tile::query_rows<const Element, features>(args, args.dO, sequence, head_idx)),
        score(args, sequence, head_idx),
        dropout(args, sequence.batch_idx, head_idx),
        lse(args.lse + tile::statistics_offset<features>(args, sequence, head_idx)),
        delta(row_delta),
        delta_scale(scale_of_delta) {}

  /// For a visible pair: the probability after dropout and the gradient of the dot product. Returns false if the row
  /// has no probabilities.
  __device__ __forceinline__ bool differentiate(int i, int j, const Element* K_row, const Element* V_row, int lane,
                                                float& p, float& ds) const {
    if constexpr (features.stacked_heads != 0) {
      if (!tile::has_head<features>(args, i)) return false;
    }
    if (lse[tile::statistic_of<features>(args, i)] < tile::lowest_lse) return false;
    float slope;
    const float capped = score.capped(tile::warp_dot<config.head_dim>(Q.row(i), K_row, lane), slope);
    const float whole = score.programmed(capped + score.added(i, j), i, j, slope);
    if (features.score_program && whole == -tile::infinity) return false;  // hidden, whatever lse is
    p = tile::exp(whole - lse[tile::statistic_of<features>(args, i)]);
    float dp = 0, factor = 1;
    if constexpr (features.dropout) factor = dropout.keeps(i, j) ? dropout.keep_scale : 0;
    if (factor != 0) dp = factor * tile::warp_dot<config.head_dim_v>(dO.row(i), V_row, lane);
    ds = p * (dp - delta[i] * delta_scale) * slope;
    p *= factor;
    return true;
  }
};

/// Where a sequence's delta begins in the layout of lse (backward/delta.cuh).
template <BackwardConfig config>
__device__ __forceinline__ const float* delta_like_lse(const AttentionArgs& args, const tile::Sequence& sequence,
                                                       int head_idx) {
  return tile::workspace<const float>(args, BackwardRegion::delta) +
         tile::statistics_offset<config.features>(args, sequence, head_idx);
}

/// Computes dK and dV of key j. delta_of(head_idx) is a head's delta, divided by delta_scale. A key that no query sees
/// has gradients of 0.
template <BackwardConfig config, typename DeltaOf>
__device__ __forceinline__ void repair_key(const AttentionArgs& args, const tile::Sequence& sequence, int kv_head_idx,
                                           int j, DeltaOf delta_of, float delta_scale = 1) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  const int lane = threadIdx.x % 32;
  const Element* K_row = tile::key_rows<const Element, features>(args.K, sequence, kv_head_idx).row(j);
  const Element* V_row = tile::key_rows<const Element, features>(args.V, sequence, kv_head_idx).row(j);
  tile::WarpRow<config.head_dim> dK;
  tile::WarpRow<config.head_dim_v> dV;
  bool done = false;  // all NaN: more rows change nothing
#pragma unroll 1
  for (int head_idx = kv_head_idx * args.group; head_idx < (kv_head_idx + 1) * args.group && !done; ++head_idx) {
    const RepairHead<config> head(args, sequence, head_idx, delta_of(head_idx), delta_scale);
    const tile::TileRange queries = head.score.sight.template query_tiles<1, 1>(j);
#pragma unroll 1
    for (int i = queries.begin; i < queries.end && !done; ++i) {
      float p, ds;
      if (!head.score.sight.visible(i, j) || !head.differentiate(i, j, K_row, V_row, lane, p, ds)) continue;
      dK.add(ds, head.Q.row(i), lane);
      if (!features.dropout || head.dropout.keeps(i, j)) dV.add(p, head.dO.row(i), lane);
      done = ptx::all(dK.all_nan(lane) && dV.all_nan(lane));
    }
  }
  dK.store(tile::key_rows<Element, features>(args.dK, sequence, kv_head_idx).row(j), args.scale, lane);
  dV.store(tile::key_rows<Element, features>(args.dV, sequence, kv_head_idx).row(j), 1, lane);
}

/// Computes dQ of query i from the keys [kv_begin, kv_end).
template <BackwardConfig config>
__device__ __forceinline__ void repair_query(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx, int i,
                                             int kv_begin, int kv_end) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  const int lane = threadIdx.x % 32;
  const RepairHead<config> head(args, sequence, head_idx, delta_like_lse<config>(args, sequence, head_idx));
  const auto K = tile::key_rows<const Element, features>(args.K, sequence, head_idx / args.group);
  const auto V = tile::key_rows<const Element, features>(args.V, sequence, head_idx / args.group);
  tile::WarpRow<config.head_dim> dQ;
#pragma unroll 1
  for (int j = kv_begin; j < tile::min(kv_end, sequence.visible_kv); ++j) {
    float p, ds;
    if (!head.score.sight.visible(i, j) || !head.differentiate(i, j, K.row(j), V.row(j), lane, p, ds)) continue;
    dQ.add(ds, K.row(j), lane);
    if (ptx::all(dQ.all_nan(lane))) break;  // more keys change nothing
  }
  dQ.store(tile::query_rows<Element, features>(args.dQ, sequence, head_idx).row(i), args.scale, lane);
}

}  // namespace flash_attention
