#pragma once

// What the rungs of the backward pass share: which pairs the mask leaves, and delta, the first of the three kernels.
// delta is the same on every rung, because it reads O and dO once and waits only for memory.

#include "ladder/parts/columns.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

/// Query i sees the keys before this one. Under a causal mask they end at the diagonal, which ends in the last corner.
template <Features features>
__device__ __forceinline__ int end_of_keys(const AttentionArgs& args, int i) {
  return features.window_right ? tile::min(i + args.seq_kv - args.seq_q + 1, args.seq_kv) : args.seq_kv;
}

/// The first query that sees key j. All later queries see it, too.
template <Features features>
__device__ __forceinline__ int begin_of_queries(const AttentionArgs& args, int j) {
  return features.window_right ? tile::max(j - (args.seq_kv - args.seq_q), 0) : 0;
}

/// delta of a head in the workspace. It has the layout of lse.
__device__ __forceinline__ float* delta_of(const AttentionArgs& args, long long statistics) {
  return tile::workspace<float>(args, BackwardRegion::delta) + statistics;
}

/// A row that sees no key has lse = -inf and no probabilities. With +inf instead, every exp(S - lse) is 0.
__device__ __forceinline__ float usable(float lse) { return lse == -tile::infinity ? tile::infinity : lse; }

/// The first kernel: delta[i] = dO[i] . O[i] - dlse[i]. A warp takes a query.
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

}  // namespace flash_attention
