#pragma once

// The idea:  the 32 threads of a warp read 32 neighbouring elements of one row: one request, two sectors, nothing wasted.
// From 01:   a warp takes a query, a lane every 32nd column of Q, K, V and O; a dot product ends with five shuffles.
// It buys:   most of an order of magnitude, from nothing but the order of addresses.
// The limit: five shuffles and some ten instructions of softmax for every single score; each row reads all of K and V.

#include "ladder/parts/columns.cuh"
#include "tile/sequence.cuh"

namespace flash_attention {

using namespace abi;

/// Whether query i sees key j. Under a causal mask it sees keys up to the diagonal, which ends in the last corner.
template <Features features>
__device__ __forceinline__ bool visible(const AttentionArgs& args, int i, int j) {
  const int last = features.window_right ? i + args.seq_kv - args.seq_q : args.seq_kv - 1;
  return j <= last && j < args.seq_kv;
}

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int dim = config.head_dim;
  using Element = ptx::Element<features.dtype>;
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const int lane = threadIdx.x % 32, i = block.tile_idx * config.block_q + threadIdx.x / 32;
  if (i >= args.seq_q) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx);

  // Softmax so far: the largest score, and the sum of exp(score - row_max).
  float row_max = -tile::infinity, row_sum = 0;
  Columns<dim> Q, K, V, O{};
  Q.load(Q_gmem.row(i), lane);
  for (int j = 0; j < args.seq_kv; ++j) {
    K.load(K_gmem.row(j), lane);
    float S = dot(Q, K);
    S = visible<features>(args, i, j) ? S * args.scale : -tile::infinity;
    // Everything so far was summed relative to row_max. A larger maximum rescales it all by the same factor.
    const float new_max = ptx::max(row_max, S);
    const float reference = new_max == -tile::infinity ? 0 : new_max;  // a row that has seen nothing: exp(-inf - 0) = 0
    const float rescale = tile::exp(row_max - reference);
    const float P = tile::exp(S - reference);
    row_max = new_max;
    row_sum = ptx::fma(row_sum, rescale, P);
    V.load(V_gmem.row(j), lane);
#pragma unroll
    for (int c = 0; c < O.count; ++c) O.values[c] = ptx::fma(P, V.values[c], O.values[c] * rescale);
  }

  const float factor = row_sum == 0 ? 0 : 1 / row_sum;
  O.store(O_gmem.row(i), lane, factor);
  if (args.lse != nullptr && lane == 0) {
    float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
    ptx::store_global(lse, row_sum == 0 ? -tile::infinity : row_max + tile::log(row_sum));
  }
}

}  // namespace flash_attention
