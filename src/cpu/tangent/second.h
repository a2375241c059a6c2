#pragma once

// Second derivatives: the gradients of F, which is the sum of backward's results dq, dk, dv, dbias and dsink, each
// times its given tangent. F is also dout times the tangent of out. So the first step is that of tangent.h: it gives dF
// / ddout and dF / ddlse, and for each row, with delta = dot(dO, O) - dlse,
//
//     mu = lse.        R = dot(dO, O.) - mu delta
//
// The second step has the structure of backward, with the same splits and the same third and later steps:
//
//     for each block of 48 queries of this item, for each tile of 64 keys that some query sees:
//         S, S.                                     score_tangents.h;  P = 2^(S - lse)
//         dP = V dOt,  dP. = V. dOt                 times dropout's factors
//         dS  = P (dP - delta)                      the gradient of S.
//         dS2 = P (S. (dP - delta) + dP. - mu dP - R)           the gradient of S
//         dV += P (S. - mu) dO
//         through the soft cap: dS2 = derivative * dS2 + second derivative * dS * scale (K Q.t + K. Qt);  dS = derivative *
//         dS dK += dS2 Q + dS Q.,  dQt += K^T dS2 + K.^T dS

#include "cpu/backward/backward.h"
#include "cpu/backward/dbias.h"
#include "cpu/tangent/tangent.h"

namespace flash_attention::cpu {
namespace {

/// The results of the first step for a row, at CpuRegion::second_rows.
struct RowOfSecond {
  float mu, delta, rest;
};

inline RowOfSecond* rows_of_second(const Call& call) { return region<RowOfSecond>(call, plan::CpuRegion::second_rows); }

/// The first step.
inline void second_rows(const Call& call, std::int64_t item, void* memory) {
  TangentScratch& scratch = *static_cast<TangentScratch*>(memory);
  const BlockList blocks = tangents_of_rows(call, item, scratch);
  if (blocks.count == 0) return;
  const RowBlock& block = blocks[0];
  TangentRows& rows = scratch.rows;
  write_tangents(call, block, rows);
  float* dOt = rows.Qt;  // Q is no longer needed
  gather_rows(call, block, call.dout, call.head_dim_v, 1, dOt);
  alignas(64) float of_out[block_q], of_tangent[block_q];
  for (int v = 0; v < block.lanes(); v += vector_lanes) {
    Vec sum{}, sum_tangent{};
    for (int c = 0; c < call.head_dim_v; ++c) {
      const int i = c * block.lanes() + v;
      sum += load(dOt + i) * load(rows.Ot + i);
      sum_tangent += load(dOt + i) * load(rows.At + i);
    }
    store(of_out + v, sum * load(rows.factor + v));
    store(of_tangent + v, sum_tangent);
  }
  RowOfSecond* to = rows_of_second(call);
  for (int lane = 0; lane < block.rows; ++lane) {
    const std::int64_t row = block.row_idx(call, lane);
    const float mu = rows.moment[lane], delta = of_out[lane] - (call.dlse != nullptr ? call.dlse[row] : 0);
    to[row] = {mu, delta, of_tangent[lane] - mu * delta};
    if (call.dsink == nullptr) continue;
    constexpr float lowest = -1e7f;  // below it a row has no gradients: docs/numerics.md
    const bool empty = block.unused[lane] || !(rows.lse[lane] >= lowest);
    const float sink_tangent = call.sink_tangent != nullptr ? call.sink_tangent[block.head[lane]] : 0;
    region<float>(call, plan::CpuRegion::sink_terms)[row] =
        empty ? 0 : -rows.sink_share(call, block, lane) * (sink_tangent * delta + to[row].rest);
  }
}

/// A block's rows in lanes, for the second step.
struct SecondLanes : GradientRows {
  alignas(64) float Qt_tangent[max_head_dim * block_q];
  alignas(64) float mu[block_q];
  alignas(64) float rest[block_q];

  void load_rows(const Call& call, const RowBlock& block) {
    GradientRows::load_rows(call, block);
    if (call.q_tangent.data != nullptr)
      gather_rows(call, block, call.q_tangent, call.head_dim, query_factor(call), Qt_tangent);
    for (int lane = 0; lane < block.lanes(); ++lane) {
      const RowOfSecond& row = rows_of_second(call)[block.row_idx(call, lane)];
      mu[lane] = row.mu, delta[lane] = row.delta, rest[lane] = row.rest;
    }
  }
};

/// A tile's scores and their second derivatives, each [keys][lanes].
struct SecondTile {
  ScoreTangents scores;                      // at the end S holds the weights of dO, and tangent dS2
  alignas(64) float dS[block_kv * block_q];  // first dP, then dS
  alignas(64) float dP_tangent[block_kv * block_q];
  alignas(64) float keep[block_kv * block_q];    // of dropout
  alignas(64) float raw[block_kv * block_q];     // tangents of the scores before the soft cap
  alignas(64) float second[block_kv * block_q];  // the second derivative of the soft cap

  /// The state before the soft cap's derivatives are applied.
  void compute(const Call& call, const RowBlock& block, const Tile& tile, const SecondLanes& rows, FloatRows K, FloatRows V,
               const KeyTangents& tangents, NextTile* next = nullptr) {
    const bool capped = call.softcap > 0;
    scores.compute(call, block, tile, K, tangents.K, rows.Qt, rows.Qt_tangent, next, capped ? raw : nullptr,
                   capped ? second : nullptr);
    const int step = diagonal_step(tile);
    for (int key = 0; key < tile.count; key += step) {
      const int count = smaller(tile.count - key, step);
      multiply_keys(block, tile, key, count, V, rows.dOt, call.head_dim_v, dS);
      if (tangents.V.data != nullptr) {
        multiply_keys(block, tile, key, count, tangents.V, rows.dOt, call.head_dim_v, dP_tangent);
      }
    }
    if (call.dropout) dropout_factors(call, block, tile, keep);
    for (int key = 0; key < tile.count; ++key) {
      for (int v = 0; v < block.lanes(); v += vector_lanes) {
        const int i = key * block.lanes() + v;
        differentiate(rows, v, i, call.dropout ? load(keep + i) : splat(1.0f),
                      tangents.V.data != nullptr ? load(dP_tangent + i) : Vec{});
      }
    }
  }

  void through_softcap(const Call& call, int size) {
    if (call.softcap == 0) return;
    for (int i = 0; i < size; i += vector_lanes) {
      const Vec ds = load(dS + i), ds2 = load(scores.tangent + i), derivative = load(scores.derivative + i);
      const auto nothing = (ds == 0.0f) & (ds2 == 0.0f);  // the derivatives of a hidden score may be NaN
      store(scores.tangent + i, select(nothing, Vec{}, ds2 * derivative + ds * load(second + i) * load(raw + i)));
      store(dS + i, select(nothing, Vec{}, ds * derivative));
    }
  }

 private:
  FLASH_ATTENTION_INLINE void differentiate(const SecondLanes& rows, int v, int i, Vec kept, Vec dp_tangent) {
    const Vec s = load(scores.S + i), s_tangent = load(scores.tangent + i), mu = load(rows.mu + v);
    const auto hidden = s == -infinity, dropped = kept == 0.0f;
    const Vec p = select(hidden, Vec{}, exp2(s - load(rows.lse + v)));
    const Vec dp = select(dropped, Vec{}, load(dS + i) * kept);  // V may be NaN if it was dropped
    dp_tangent = select(dropped, Vec{}, dp_tangent * kept);
    const Vec above = dp - load(rows.delta + v);
    const Vec of_p = s_tangent * above + dp_tangent - mu * dp - load(rows.rest + v);
    store(scores.S + i, select(hidden | dropped, Vec{}, p * kept * (s_tangent - mu)));
    store(scores.tangent + i, select(hidden, Vec{}, p * of_p));
    store(dS + i, select(hidden, Vec{}, p * above));
  }
};

/// The state of a block of rows while the loop goes over the keys.
struct SecondRows {
  SecondLanes lanes;
  alignas(64) float dQt[max_head_dim * block_q];
  alignas(64) float Q[block_q * max_head_dim];  // rows of float, padded to whole vectors
  alignas(64) float Q_tangent[block_q * max_head_dim];
  alignas(64) float dO[block_q * max_head_dim];

  void start(const Call& call, const RowBlock& block) {
    lanes.load_rows(call, block);
    copy_rows(call, block, call.q, call.head_dim, Q);
    if (call.q_tangent.data != nullptr) copy_rows(call, block, call.q_tangent, call.head_dim, Q_tangent);
    copy_rows(call, block, call.dout, call.head_dim_v, dO);
    for (int i = 0; i < call.head_dim * block.lanes(); ++i) dQt[i] = 0;
  }
};

struct SecondScratch {
  SecondRows rows;
  SecondTile tile;
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float K_tangent[block_kv * max_head_dim];
  alignas(64) float V_tangent[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float factor[block_q];
};

inline void second_tile(const Call& call, const RowBlock& block, const Tile& tile, FloatRows K, FloatRows V,
                        const KeyGradients& sums, SecondScratch& scratch, NextTile& next) {
  SecondRows& rows = scratch.rows;
  SecondTile& of = scratch.tile;
  const KeyTangents tangents(call, block, tile, scratch);
  of.compute(call, block, tile, rows.lanes, K, V, tangents, &next);
  add_to_keys(block, tile, of.scores.S, rows.dO, call.head_dim_v, sums.dV(tile.begin), sums.stride(), scratch.safe);
  of.through_softcap(call, tile.count * block.lanes());
  const float *dS2 = of.scores.tangent, *dS = of.dS;
  add_to_keys(block, tile, dS2, rows.Q, call.head_dim, sums.dK(tile.begin), sums.stride(), scratch.safe);
  add_to_lanes<Start::add>(block, tile, K, call.head_dim, dS2, rows.dQt, scratch.safe);
  if (call.q_tangent.data != nullptr)
    add_to_keys(block, tile, dS, rows.Q_tangent, call.head_dim, sums.dK(tile.begin), sums.stride(), scratch.safe);
  if (tangents.K.data != nullptr)
    add_to_lanes<Start::add>(block, tile, tangents.K, call.head_dim, dS, rows.dQt, scratch.safe);
}

/// The second step: dF / dq, and the sums of dF / dk and dF / dv.
inline void second(const Call& call, std::int64_t item, void* memory) {
  SecondScratch& scratch = *static_cast<SecondScratch*>(memory);
  for_each_block(call, item, [&](const BlockList& blocks, const KeyGradients& sums) {
    const RowBlock& block = blocks[0];
    scratch.rows.start(call, block);
    for_tiles(call, blocks, false, scratch, [&](int, const Tile& tile, FloatRows K, FloatRows V, NextTile& next) {
      second_tile(call, block, tile, K, V, sums, scratch, next);
    });
    write_dq(call, block, 0, scratch.rows.dQt, scratch.factor);
  });
}

/// The scratch of dbias.h for the sums of dF / dbias.
struct SecondBiasScratch {
  SecondLanes rows;
  SecondTile tile;
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float K_tangent[block_kv * max_head_dim];
  alignas(64) float V_tangent[block_kv * max_head_dim];
  alignas(64) float sum[block_kv * block_q];

  const float* score_gradient(const Call& call, const RowBlock& block, const Tile& at) {
    rows.load_rows(call, block);
    const FloatRows keys = key_rows(call, block, call.k, at.begin, at.count, call.head_dim, false, K);
    const FloatRows values = key_rows(call, block, call.v, at.begin, at.count, call.head_dim_v, false, V);
    tile.compute(call, block, at, rows, keys, values, KeyTangents(call, block, at, *this));
    return tile.scores.tangent;
  }
};

}  // namespace
}  // namespace flash_attention::cpu
