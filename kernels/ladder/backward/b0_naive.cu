#pragma once

// The idea:  the gradients by their formulas, in three kernels; each computes P again from Q, K and lse.
// From 02:   its warp for a row and lane for every 32nd column; no online softmax: lse is known from the forward pass.
// It buys:   gradients without P and dS in memory, and without atomics.
// The limit: every row reads all rows of the other side again, and ten shuffles for each score.
//
//   delta   delta[i] = sum over d of dO[i][d] O[i][d] - dlse[i]          a warp takes a query
//   dq      dQ[i]    = scale * sum over j of dS[i][j] K[j]               a warp takes a query
//   dkv     dV[j]    = sum over i of P[i][j] dO[i]                       a warp takes a key
//           dK[j]    = scale * sum over i of dS[i][j] Q[i]
//
//   P[i][j] = exp(scale Q[i] K[j] - lse[i]),  dP[i][j] = dO[i] V[j],  dS[i][j] = P[i][j] (dP[i][j] - delta[i])

#include "ladder/parts/backward.cuh"

namespace flash_attention {

using namespace abi;

template <BackwardConfig config>
__device__ __forceinline__ void dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const int lane = threadIdx.x % 32, i = block.tile_idx * config.block_q + threadIdx.x / 32;
  if (i >= args.seq_q) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  const float lse = usable(args.lse[statistics + i]), delta = delta_of(args, statistics)[i];

  Columns<config.head_dim> Q, dO, K, V, dQ{};
  Q.load(tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx).row(i), lane);
  dO.load(tile::query_rows<const Element, features>(args.dO, sequence, block.head_idx).row(i), lane);
  for (int j = 0; j < end_of_keys<features>(args, i); ++j) {
    K.load(K_gmem.row(j), lane);
    V.load(V_gmem.row(j), lane);
    const float P = tile::exp(dot(Q, K) * args.scale - lse);
    dQ.add(P * (dot(dO, V) - delta), K);
  }
  dQ.store(tile::query_rows<Element, features>(args.dQ, sequence, block.head_idx).row(i), lane, args.scale);
}

template <BackwardConfig config>
__device__ __forceinline__ void dkv(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  // Which tile of keys, of which head and sequence, this block computes.
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv);
  const int lane = threadIdx.x % 32, j = block.tile_idx * config.block_kv + threadIdx.x / 32;
  if (j >= args.seq_kv) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  Columns<config.head_dim> K, V, Q, dO, dK{}, dV{};
  K.load(tile::key_rows<const Element, features>(args.K, sequence, block.head_idx).row(j), lane);
  V.load(tile::key_rows<const Element, features>(args.V, sequence, block.head_idx).row(j), lane);
  for (int head_idx = block.head_idx * args.group; head_idx < (block.head_idx + 1) * args.group; ++head_idx) {
    const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    const auto dO_gmem = tile::query_rows<const Element, features>(args.dO, sequence, head_idx);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
    for (int i = begin_of_queries<features>(args, j); i < args.seq_q; ++i) {
      Q.load(Q_gmem.row(i), lane);
      dO.load(dO_gmem.row(i), lane);
      const float P = tile::exp(dot(Q, K) * args.scale - usable(args.lse[statistics + i]));
      dV.add(P, dO);
      dK.add(P * (dot(dO, V) - delta_of(args, statistics)[i]), Q);
    }
  }
  dK.store(tile::key_rows<Element, features>(args.dK, sequence, block.head_idx).row(j), lane, args.scale);
  dV.store(tile::key_rows<Element, features>(args.dV, sequence, block.head_idx).row(j), lane, 1);
}

}  // namespace flash_attention
