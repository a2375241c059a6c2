#pragma once

#include "ptx/shared.cuh"
#include "tile/product.cuh"
#include "tile/sequence.cuh"
#include "tile/tail.cuh"
#include "tile/workspace.cuh"

// What the backward pass computes for each row, before the score tiles (delta) and after them (dsink).
//
//   delta[i] = sum over d of dO[i][d] * O[i][d]  -  dlse[i]        so that dS = P * (dP - delta)
//              [+ dentropy[i] * (entropy[i] - sum over j of P[i][j])]   if a gradient flows through the entropy
//   dsink[h] = sum over all rows i of head h of  -exp(sink[h] - lse[i]) * delta[i]
//
// delta is a region of the workspace, BackwardRegion::delta, in the layout of lse.

namespace flash_attention {

using namespace abi;

/// One block of 256 threads takes 64 rows of one head; sixteen lanes share a row. Rows in no sequence are zeroed here.
template <BackwardConfig config>
__device__ __forceinline__ void backward_delta(const AttentionArgs& args) {
  constexpr Features features = config.features;
  using Element = const ptx::Element<features.dtype>;
  tile::clear_gradient_tails<config>(args, threadIdx.x, tile::product_threads);
  if (args.seq_q == 0) return;
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, tile::block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const auto O = tile::query_rows<Element, features>(args.O, sequence, block.head_idx);
  const auto dO = tile::query_rows<Element, features>(args.dO, sequence, block.head_idx);
  const bool O_by_four = tile::moves_by_four(O.data, O.stride), dO_by_four = tile::moves_by_four(dO.data, dO.stride);
  const long long statistics = tile::statistics_offset<features>(args, sequence, block.head_idx);
  auto* delta = tile::workspace<float>(args, BackwardRegion::delta) + statistics;

  const tile::ThreadPlace place;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = block.tile_idx * tile::block_rows + place.row + r;
    float sum = 0;
    for (int column = place.column; i < sequence.len_q && column < config.head_dim_v; column += 64) {
      const tile::Four o = tile::load_four_of<config.head_dim_v>(O.data + i * O.stride, column, O_by_four);
      const tile::Four d = tile::load_four_of<config.head_dim_v>(dO.data + i * dO.stride, column, dO_by_four);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum += o[c] * d[c];
    }
    sum = tile::row_total(sum);
    if constexpr (features.entropy) {
      if (i < sequence.len_q) {
        float seen = 1;  // the sum of the row's probabilities
        const float lse = args.lse[statistics + i];
        if constexpr (features.sink) seen -= tile::exp(args.sink[block.head_idx] - lse);
        if (lse != -tile::infinity) sum += args.dentropy[statistics + i] * (args.entropy[statistics + i] - seen);
      }
    }
    if (place.column == 0 && i < sequence.len_q) delta[i] = sum - (args.dlse != nullptr ? args.dlse[statistics + i] : 0);
  }
}

struct SinkStorage {
  float partial[tile::product_threads];
};

/// The sum of -exp(sink - lse) times term(row) over the rows of a head; rows are in the layout of lse. One block
/// of 256 threads takes a head. The sums have a fixed order, so the result has the same bits in every run.
template <BackwardConfig config, class Term>
__device__ __forceinline__ void sum_over_rows(const AttentionArgs& args, Term term) {
  if (args.dsink == nullptr) return;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<SinkStorage>();
  const int head_idx = blockIdx.x, thread = threadIdx.x;
  const float sink = args.sink[head_idx];

  float sum = 0;
  for (int batch_idx = 0; batch_idx < args.batch; ++batch_idx) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);
    for (int i = thread; i < sequence.len_q; i += tile::product_threads) {
      const float lse = args.lse[statistics + i];
      if (lse != -tile::infinity) sum -= tile::exp(sink - lse) * term(statistics + i);
    }
  }
  storage.partial[thread] = sum;
  for (int half = tile::product_threads / 2; half > 0; half /= 2) {
    __syncthreads();  // the partial sums of the previous step are written
    if (thread < half) storage.partial[thread] += storage.partial[thread + half];
  }
  if (thread == 0) args.dsink[head_idx] = storage.partial[0];
}

template <BackwardConfig config>
__device__ __forceinline__ void backward_dsink(const AttentionArgs& args) {
  const auto* delta = tile::workspace<const float>(args, BackwardRegion::delta);
  sum_over_rows<config>(args, [&](long long row) { return delta[row]; });
}

}  // namespace flash_attention
