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

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// Query i sees the keys before this one: all or, under a causal mask, those up to the diagonal, which ends in the last
/// corner.
template <Features features>
__device__ __forceinline__ int end_of_keys(const AttentionArgs& args, int i) {
  return features.window_right ? tile::min(i + args.seq_kv - args.seq_q + 1, args.seq_kv) : args.seq_kv;
}

/// Key j is seen by this query and those after it.
template <Features features>
__device__ __forceinline__ int begin_of_queries(const AttentionArgs& args, int j) {
  return features.window_right ? tile::max(j - (args.seq_kv - args.seq_q), 0) : 0;
}

/// A lane's columns of a row: lane, lane + 32, ...
template <int dim>
struct Columns {
  static constexpr int count = tile::ceil_div(dim, 32);
  float values[count];

  template <typename Element>
  __device__ __forceinline__ void load(const Element* row, int lane) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      values[c] = d < dim ? ptx::to_float(ptx::load_readonly(row + d)) : 0;
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store(Element* row, int lane, float factor) const {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const int d = 32 * c + lane;
      if (d < dim) ptx::store_global(row + d, ptx::from_float<Element>(values[c] * factor));
    }
  }

  __device__ __forceinline__ void add(float weight, const Columns& row) {
#pragma unroll
    for (int c = 0; c < count; ++c) values[c] = ptx::fma(weight, row.values[c], values[c]);
  }
};

/// The dot product of two rows, in every lane.
template <int dim>
__device__ __forceinline__ float dot(const Columns<dim>& a, const Columns<dim>& b) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < a.count; ++c) sum = ptx::fma(a.values[c], b.values[c], sum);
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) sum += ptx::shuffle_xor(sum, lane);
  return sum;
}

__device__ __forceinline__ float* delta_of(const AttentionArgs& args, long long statistics) {
  return tile::workspace<float>(args, BackwardRegion::delta) + statistics;
}

/// A row that saw no key has lse = -inf and no probabilities: with +inf, every exp(S - lse) is 0.
__device__ __forceinline__ float usable(float lse) { return lse == -tile::infinity ? tile::infinity : lse; }

template <BackwardConfig config>
__device__ __forceinline__ void delta(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.num_warps), args.heads_q);
  const int lane = threadIdx.x % 32, i = block.tile_idx * config.num_warps + threadIdx.x / 32;
  if (i >= args.seq_q) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  Columns<config.head_dim> O, dO;
  O.load(tile::query_rows<const Element, features>(args.O, sequence, block.head_idx).row(i), lane);
  dO.load(tile::query_rows<const Element, features>(args.dO, sequence, block.head_idx).row(i), lane);
  const float sum = dot(O, dO) - (args.dlse != nullptr ? args.dlse[statistics + i] : 0);
  if (lane == 0) ptx::store_global(delta_of(args, statistics) + i, sum);
}

template <BackwardConfig config>
__device__ __forceinline__ void dq(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
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
