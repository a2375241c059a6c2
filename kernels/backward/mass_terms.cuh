#pragma once

#include "ptx/shared.cuh"
#include "tile/probability.cuh"
#include "tile/workspace.cuh"

// Adds the terms of key-mass gradients to delta, which backward/delta.cuh has written:
//
//   delta[i] += sum over j of P[i][j] * dkey_mass[j]
//
// One block of 256 threads takes 64 queries of a head, and goes over the keys in tiles of 64.

namespace flash_attention {

using namespace abi;

template <BackwardConfig config>
__device__ __forceinline__ void backward_mass_terms(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<tile::ProductStorage<config.head_dim>>();
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * block_rows;
  if (q_begin >= sequence.len_q) return;

  const tile::Probabilities<features, config.head_dim> probabilities(args, sequence, block.head_idx);
  const float* dkey_mass = args.dkey_mass + tile::key_mass_offset<features>(args, sequence, block.head_idx);
  const tile::ThreadPlace place;
  float term[4]{};
  const auto tiles = probabilities.score.sight.template key_tiles<block_rows, block_rows>(q_begin);
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    const int kv_begin = tile_idx * block_rows;
    float P[4][4];
    if (!probabilities.compute(P, q_begin, kv_begin, storage)) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int j = kv_begin + place.column + c;
      const float gradient = j < sequence.rows_kv ? dkey_mass[j] : 0;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (P[r][c] != 0) term[r] += P[r][c] * gradient;
      }
    }
  }
  float* delta = tile::workspace<float>(args, BackwardRegion::delta) +
                 tile::statistics_offset<features>(args, sequence, block.head_idx);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float sum = tile::row_total(term[r]);
    const int i = q_begin + place.row + r;
    if (place.column == 0 && i < sequence.len_q) delta[i] += sum;
  }
}

}  // namespace flash_attention
