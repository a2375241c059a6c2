#pragma once

#include "abi/forward_sm90_fp8.h"
#include "ptx/memory.cuh"
#include "ptx/pairs.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

// Writes V^T for forward/sm90_fp8 to the workspace: 8-bit products need the keys of V contiguous. Within each 16 keys,
// places 4u, 4u + 1, 4u + 2, 4u + 3 hold keys 2u, 2u + 1, 2u + 8, 2u + 9 (softmax.cuh says why). Keys that no query sees
// become 0, so that a probability of 0 is never multiplied by a NaN after the end of a sequence.
//
// A thread block processes 256 keys of a head:
//
//     V -> registers, four columns of 16 keys per lane;  4 x 4 bytes transposed -> shared
//     rows of V^T, 256 bytes each, shared -> workspace

namespace flash_attention {

namespace forward_sm90_fp8 {
constexpr int transposing_warps = 8, keys_of_warp = 32, transposed_columns = 128;

struct TransposeStorage {
  static constexpr int row_bytes = transposing_warps * keys_of_warp;
  unsigned char columns[transposed_columns * row_bytes];

  /// The place of 16 keys of a column, swizzled so that eight lanes that write or read together have no bank conflict.
  __device__ __forceinline__ unsigned place(int column, int sixteen) const {
    return ptx::shared_address(columns) + column * row_bytes + (sixteen ^ column / 4 % 8) * 16;
  }
};
static_assert(sizeof(TransposeStorage) == abi::forward_sm90_fp8_transpose_bytes);

/// 16 words with four columns of a key each become four columns of 16 keys.
__device__ __forceinline__ void transpose_bytes(const unsigned* words, ptx::Vector<unsigned, 4> (&columns)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned* four = words + 4 * i;
    const unsigned low01 = ptx::permute_bytes(four[0], four[1], 0x5140u);  // columns 0 and 1 of two keys
    const unsigned high01 = ptx::permute_bytes(four[0], four[1], 0x7362u);
    const unsigned low23 = ptx::permute_bytes(four[2], four[3], 0x5140u);
    const unsigned high23 = ptx::permute_bytes(four[2], four[3], 0x7362u);
    columns[0][i] = ptx::permute_bytes(low01, low23, 0x5410u);
    columns[1][i] = ptx::permute_bytes(low01, low23, 0x7632u);
    columns[2][i] = ptx::permute_bytes(high01, high23, 0x5410u);
    columns[3][i] = ptx::permute_bytes(high01, high23, 0x7632u);
  }
}
}  // namespace forward_sm90_fp8

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_fp8_transpose(const abi::AttentionArgs& args) {
  using namespace forward_sm90_fp8;
  constexpr abi::Features features = config.features;
  using Words = ptx::Vector<unsigned, 4>;
  constexpr int keys_of_block = TransposeStorage::row_bytes, threads = transposing_warps * 32;
  auto& shared = ptx::shared_storage<TransposeStorage>();
  const int tiles = tile::ceil_div(tile::round_up(args.seq_kv, config.block_kv), keys_of_block);
  const int index = static_cast<int>(blockIdx.x), tile_idx = index % tiles, rest = index / tiles;
  const int head_idx = rest % args.heads_kv, batch_idx = rest / args.heads_kv;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int first_key = tile_idx * keys_of_block;
  const int used = tile::min(keys_of_block, tile::round_up(sequence.rows_kv, config.block_kv) - first_key);
  if (used <= 0) return;

  const long long places = abi::transposed_places(features.packed, args.batch, args.seq_kv, args.total_kv, config.block_kv);
  long long place = first_key, rows = static_cast<long long>(batch_idx) * args.heads_kv + head_idx;
  if constexpr (features.packed) {
    place += abi::transposed_start(sequence.start_kv, batch_idx, config.block_kv);
    rows = head_idx;
  }
  auto* const to = tile::workspace<unsigned char>(args, abi::ForwardSm90Fp8Region::transposed_V) +
                   rows * config.head_dim_v * places + place;
  const auto V = tile::key_rows<const unsigned char, features>(args.V, sequence, head_idx);
#pragma unroll 1
  for (int first_column = 0; first_column < config.head_dim_v; first_column += transposed_columns) {
    const int column = first_column + 4 * lane;
    if (first_column > 0) __syncthreads();  // the previous columns have been read
    if (column < config.head_dim_v) {
      unsigned words[keys_of_warp];  // four columns of each key, in the order of the places
      const int first = first_key + warp * keys_of_warp, visible = sequence.visible_kv - first;
      const unsigned char* from = V.row(first) + column;
      // One key after another, so that each address takes one addition.
      const auto load = [&](auto is_visible) {
#pragma unroll
        for (int key = 0; key < keys_of_warp; ++key, from += V.stride) {
          const int place = key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
          words[place] = is_visible(key) ? ptx::load_readonly(reinterpret_cast<const unsigned*>(from)) : 0u;
        }
      };
      if (visible >= keys_of_warp) {
        load([](int) { return true; });
      } else {
        load([&](int key) { return key < visible; });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Words columns[4];
        transpose_bytes(words + 16 * half, columns);
#pragma unroll
        for (int c = 0; c < 4; ++c) ptx::store_shared(shared.place(4 * lane + c, 2 * warp + half), columns[c]);
      }
    }
    __syncthreads();  // all keys of the columns are in shared memory
    constexpr int pieces = keys_of_block / 16, step = threads / pieces;
    const int piece = thread % pieces, first = thread / pieces;
    if (16 * piece >= used) continue;
    unsigned char* place_of = to + (first_column + first) * places + 16 * piece;
#pragma unroll
    for (int c = 0; c < transposed_columns; c += step, place_of += step * places) {
      if (config.head_dim_v % transposed_columns != 0 && first_column + first + c >= config.head_dim_v) break;
      ptx::store_global(reinterpret_cast<Words*>(place_of), ptx::load_shared<Words>(shared.place(first + c, piece)));
    }
  }
}

}  // namespace flash_attention
