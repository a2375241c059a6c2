#pragma once

#include "abi/forward_sm90_fp8.h"
#include "ptx/memory.cuh"
#include "ptx/pairs.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

// V^T for forward/sm90_fp8, in the workspace: products of 8 bits want the keys of V contiguous. Within each 16 keys places
// 4u, 4u + 1, 4u + 2, 4u + 3 hold keys 2u, 2u + 1, 2u + 8, 2u + 9 (softmax.cuh says why). Keys that no query sees are 0, so
// that a probability of 0 meets no NaN behind the end of a sequence.
//
// A warp takes 32 keys of a head: each lane reads four columns of every key and writes four rows of 32 places.

namespace flash_attention {

namespace forward_sm90_fp8 {
constexpr int transposing_warps = 8, keys_of_warp = 32;
}

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm90_fp8_transpose(const abi::AttentionArgs& args) {
  using namespace forward_sm90_fp8;
  constexpr abi::Features features = config.features;
  using Word = ptx::Vector<unsigned, 4>;
  constexpr int keys_of_block = transposing_warps * keys_of_warp;
  const int tiles = tile::ceil_div(tile::round_up(args.seq_kv, config.block_kv), keys_of_block);
  const int index = static_cast<int>(blockIdx.x), tile_idx = index % tiles, rest = index / tiles;
  const int head_idx = rest % args.heads_kv, batch_idx = rest / args.heads_kv;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_key = tile_idx * keys_of_block + warp * keys_of_warp;
  if (first_key >= tile::round_up(sequence.rows_kv, config.block_kv)) return;

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
  for (int column = 4 * lane; column < config.head_dim_v; column += 128) {
    unsigned words[keys_of_warp];  // four columns of each key, in the order of places
#pragma unroll
    for (int p = 0; p < keys_of_warp; ++p) {
      const int key = first_key + p / 16 * 16 + p % 4 / 2 * 8 + p % 16 / 4 * 2 + p % 2;
      words[p] = key < sequence.visible_kv ? ptx::load_global(reinterpret_cast<const unsigned*>(V.row(key) + column)) : 0u;
    }
    unsigned columns[4][keys_of_warp / 4];
#pragma unroll
    for (int p = 0; p < keys_of_warp; p += 4) {
      const unsigned low01 = ptx::permute_bytes(words[p], words[p + 1], 0x5140u);  // columns 0 and 1 of two keys
      const unsigned high01 = ptx::permute_bytes(words[p], words[p + 1], 0x7362u);
      const unsigned low23 = ptx::permute_bytes(words[p + 2], words[p + 3], 0x5140u);
      const unsigned high23 = ptx::permute_bytes(words[p + 2], words[p + 3], 0x7362u);
      columns[0][p / 4] = ptx::permute_bytes(low01, low23, 0x5410u);
      columns[1][p / 4] = ptx::permute_bytes(low01, low23, 0x7632u);
      columns[2][p / 4] = ptx::permute_bytes(high01, high23, 0x5410u);
      columns[3][p / 4] = ptx::permute_bytes(high01, high23, 0x7632u);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned* from = columns[c] + 4 * half;
        ptx::store_global(reinterpret_cast<Word*>(to + (column + c) * places + 16 * half),
                          Word{from[0], from[1], from[2], from[3]});
      }
    }
  }
}

}  // namespace flash_attention
