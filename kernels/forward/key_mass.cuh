#pragma once

#include "ptx/shared.cuh"
#include "tile/probability.cuh"
#include "tile/tail.cuh"

// How much attention each key has received: the sum over the queries of its probabilities, before dropout. It needs the
// lse of each row, so it is a launch after forward, which computes the scores again: three products instead of two.
//
// One block of 256 threads owns 64 keys of a query head, and adds in a fixed order: the same bits in every run.
//
//   for each tile of 64 queries that see some of the keys:
//     P = exp(Q K^T - lse)                 tile/probability.cuh
//     mass[key] += P                       four sums a thread, added over the sixteen threads of a column at the end

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct KeyMassStorage {
  union {
    tile::ProductStorage<config.head_dim> product;
    float partial[16][tile::block_rows];
  };
};

template <ForwardConfig config>
__device__ __forceinline__ void forward_key_mass(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int block_rows = tile::block_rows;
  auto& storage = ptx::shared_storage<KeyMassStorage<config>>();
  tile::clear_key_mass_tail<config>(args, threadIdx.x, tile::product_threads);
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, block_rows), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * block_rows;
  if (kv_begin >= sequence.rows_kv) return;

  const tile::Probabilities<features, config.head_dim> probabilities(args, sequence, block.head_idx);
  float mass[4]{};
  const auto tiles = probabilities.score.sight.template query_tiles<block_rows, block_rows>(kv_begin);
#pragma unroll 1
  for (int tile_idx = tiles.begin; tile_idx < tiles.end; ++tile_idx) {
    float P[4][4];
    if (!probabilities.compute(P, tile_idx * block_rows, kv_begin, storage.product)) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) mass[c] += (P[0][c] + P[1][c]) + (P[2][c] + P[3][c]);
  }

  const tile::ThreadPlace place;
  __syncthreads();  // the last tile has been read
#pragma unroll
  for (int c = 0; c < 4; ++c) storage.partial[place.row / 4][place.column + c] = mass[c];
  __syncthreads();  // all sums are written
  const int key = threadIdx.x;
  if (key >= block_rows || kv_begin + key >= sequence.rows_kv) return;
  float sum = 0;
  for (int row = 0; row < 16; ++row) sum += storage.partial[row][key];
  args.key_mass[tile::key_mass_offset<features>(args, sequence, block.head_idx) + kv_begin + key] = sum;
}

}  // namespace flash_attention
