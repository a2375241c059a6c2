#pragma once

// The idea:  the textbook in three kernels: S = Q K^T, P = softmax(S), O = P V; S and P are in global memory.
// Before it: nothing. One thread computes one element of S, one row of P, one element of O.
// It buys:   a result that is easy to believe; every later rung is compared with its speed.
// The limit: S and P are written and read in full, and the 32 threads of a warp read 32 rows of K at once.

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

/// Row i of S, and later of P, of one head: fp32 [batch, heads_q, seq_q, seq_kv] in the workspace.
__device__ __forceinline__ float* score_row(const AttentionArgs& args, const tile::BlockCoordinates& block, int i) {
  const long long head = static_cast<long long>(block.batch_idx) * args.heads_q + block.head_idx;
  return static_cast<float*>(args.workspace) + (head * args.seq_q + i) * args.seq_kv;
}

/// S[i][j] = scale * Q[i] . K[j]. A block takes block_kv neighbours of one row.
template <ForwardConfig config>
__device__ __forceinline__ void scores(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  // Neighbouring blocks have neighbouring keys, then the next query.
  const int blocks_per_row = tile::ceil_div(args.seq_kv, config.block_kv);
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, args.seq_q * blocks_per_row, args.heads_q);
  const int i = block.tile_idx / blocks_per_row;
  const int j = block.tile_idx % blocks_per_row * config.block_kv + threadIdx.x;
  if (j >= args.seq_kv) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  // Rows of this head in global memory. Several query heads may share a head of keys and values.
  const auto Q_gmem = tile::query_rows<const Element, features>(args.Q, sequence, block.head_idx);
  const auto K_gmem = tile::key_rows<const Element, features>(args.K, sequence, block.head_idx / args.group);
  // One element of S is a dot product of a row of Q and a row of K.
  float dot = 0;
  for (int d = 0; d < config.head_dim; ++d) {
    const float q = ptx::to_float(ptx::load_readonly(Q_gmem.row(i) + d));
    const float k = ptx::to_float(ptx::load_readonly(K_gmem.row(j) + d));
    dot = ptx::fma(q, k, dot);
  }
  const float S = visible<features>(args, i, j) ? dot * args.scale : -tile::infinity;
  ptx::store_global(score_row(args, block, i) + j, S);
}

/// P[i] = softmax(S[i]), in place of S, and lse[i]. A thread takes a row.
template <ForwardConfig config>
__device__ __forceinline__ void softmax(const AttentionArgs& args) {
  constexpr Features features = config.features;
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const int i = block.tile_idx * config.block_q + threadIdx.x;
  if (i >= args.seq_q) return;

  // Three loops over the row: its maximum, its sum, its probabilities.
  float* S = score_row(args, block, i);
  // Softmax so far: the largest score, and the sum of exp(score - row_max).
  float row_max = -tile::infinity, row_sum = 0;
  for (int j = 0; j < args.seq_kv; ++j) row_max = ptx::max(row_max, ptx::load_global(S + j));
  // A row that sees no key keeps finite arithmetic: exp(-inf - 0) = 0.
  const float reference = row_max == -tile::infinity ? 0 : row_max;
  for (int j = 0; j < args.seq_kv; ++j) row_sum += tile::exp(ptx::load_global(S + j) - reference);
  const float factor = row_sum == 0 ? 0 : 1 / row_sum;
  for (int j = 0; j < args.seq_kv; ++j) ptx::store_global(S + j, tile::exp(ptx::load_global(S + j) - reference) * factor);
  // The log-sum-exp of the row, which the backward pass needs.
  if (args.lse != nullptr) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
    float* lse = args.lse + tile::statistics_offset<features>(args, sequence, block.head_idx) + i;
    ptx::store_global(lse, row_sum == 0 ? -tile::infinity : row_max + tile::log(row_sum));
  }
}

/// O[i][d] = sum over j of P[i][j] V[j][d]. A block takes a row, a thread a column.
template <ForwardConfig config>
__device__ __forceinline__ void output(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = ptx::Element<features.dtype>;
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, args.seq_q, args.heads_q);
  const int i = block.tile_idx, d = threadIdx.x;
  if (d >= config.head_dim) return;

  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto V_gmem = tile::key_rows<const Element, features>(args.V, sequence, block.head_idx / args.group);
  const auto O_gmem = tile::query_rows<Element, features>(args.O, sequence, block.head_idx);
  // One element of O is a dot product of a row of P and a column of V.
  const float* P = score_row(args, block, i);
  float sum = 0;
  for (int j = 0; j < args.seq_kv; ++j) {
    sum = ptx::fma(ptx::load_global(P + j), ptx::to_float(ptx::load_readonly(V_gmem.row(j) + d)), sum);
  }
  ptx::store_global(O_gmem.row(i) + d, ptx::from_float<Element>(sum));
}

}  // namespace flash_attention
