#pragma once

// The idea:  online softmax: a row needs only its running maximum, sum and output, so S and P are never stored.
// From 00:   the three kernels become one loop over the keys; one thread takes one query.
// It buys:   memory, not time: no matrix of 4.3 GB at 4 x 16 heads of 4096 x 4096, and no time lost for it.
// The limit: the 32 threads of a warp read 32 rows of Q at once: 32 sectors of memory for 64 bytes of use.

#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
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
  const int i = block.tile_idx * config.block_q + threadIdx.x;
  if (i >= args.seq_q) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx);

  // Softmax so far: the largest score, and the sum of exp(score - row_max).
  float row_max = -tile::infinity, row_sum = 0;
  // The row's output so far, relative to row_max.
  float O[dim]{};
  for (int j = 0; j < args.seq_kv; ++j) {
    float S = 0;
    for (int d = 0; d < dim; ++d) {
      const float q = ptx::to_float(ptx::load_readonly(Q_gmem.row(i) + d));
      const float k = ptx::to_float(ptx::load_readonly(K_gmem.row(j) + d));
      S = ptx::fma(q, k, S);
    }
    S = visible<features>(args, i, j) ? S * args.scale : -tile::infinity;
    // Everything so far was summed relative to row_max. A larger maximum rescales it all by the same factor.
    const float new_max = ptx::max(row_max, S);
    const float reference = new_max == -tile::infinity ? 0 : new_max;  // a row that has seen nothing: exp(-inf - 0) = 0
    const float rescale = tile::exp(row_max - reference);
    const float P = tile::exp(S - reference);
    row_max = new_max;
    row_sum = ptx::fma(row_sum, rescale, P);
#pragma unroll
    for (int d = 0; d < dim; ++d) {
      const float v = ptx::to_float(ptx::load_readonly(V_gmem.row(j) + d));
      O[d] = ptx::fma(P, v, O[d] * rescale);
    }
  }

  const float factor = row_sum == 0 ? 0 : 1 / row_sum;
#pragma unroll
  for (int d = 0; d < dim; ++d) ptx::store_global(O_gmem.row(i) + d, ptx::from_float<Element>(O[d] * factor));
  // The log-sum-exp of the row, which the backward pass needs.
  if (args.lse != nullptr) {
    float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
    ptx::store_global(lse, row_sum == 0 ? -tile::infinity : row_max + tile::log(row_sum));
  }
}

}  // namespace flash_attention
