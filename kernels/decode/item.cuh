#pragma once

#include "abi/decode.h"
#include "ptx/memory.cuh"
#include "tile/score.cuh"

// An item of work of the decode kernels: block_q rows of a key head of a sequence, and the tiles of keys that these see.

namespace flash_attention::decode {

using namespace abi;

/// Query tokens, the last one excluded.
struct Tokens {
  int begin;
  int end;
};

template <ForwardConfig config>
struct Item {
  static constexpr Features features = config.features;
  // All items have the same tiles of keys: nothing is read from memory to find one.
  static constexpr bool alike = decode_items_are_alike(features);

  int batch_idx;
  int kv_head_idx;
  int row_tile;
  int first_tile;  // of keys
  int end_tile;
  tile::KeyRange seen;  // by some row; keys outside of it are not loaded
  bool only_rows;       // of the key head: there is no other item of it

  // Where splits are fixed: that of a tile, counted from key 0, and its end. A row's bits depend on these alone.
  static constexpr int split_of(int tile) { return config.split_tiles > 0 ? tile / config.split_tiles : 0; }
  __device__ __forceinline__ int split_end(int tile) const {
    return config.split_tiles > 0 ? tile::min(end_tile, (split_of(tile) + 1) * config.split_tiles) : end_tile;
  }
  __device__ __forceinline__ bool begins_split(int tile) const {
    return tile == first_tile || (config.split_tiles > 0 && tile % config.split_tiles == 0);
  }

  /// Tiles of rows that this block's items have, and the first of them: all, or that of blockIdx.y.
  __device__ __forceinline__ static int row_tiles_of(const tile::Sequence& sequence) {
    static_assert(!config.one_row_tile || !(features.packed || config.row_grid));
    if constexpr (config.one_row_tile) return 1;
    const int tiles = tile::ceil_div(sequence.rows_q * config.group, config.block_q);
    return config.row_grid ? tile::min(1, tile::max(0, tiles - first_row_tile())) : tiles;
  }
  __device__ __forceinline__ static int first_row_tile() { return config.row_grid ? static_cast<int>(blockIdx.y) : 0; }
  /// The same of key heads.
  __device__ __forceinline__ static int heads_of(const AttentionArgs& args) { return config.head_grid ? 1 : args.heads_kv; }
  __device__ __forceinline__ static int first_head() { return config.head_grid ? static_cast<int>(blockIdx.y) : 0; }
  __device__ __forceinline__ static Tokens tokens_of(const tile::Sequence& sequence, int row_tile) {
    const int first = row_tile * config.block_q, rows = sequence.rows_q * config.group;
    return {first / config.group, tile::ceil_div(tile::min(first + config.block_q, rows), config.group)};
  }

  /// To item `idx` of all, where every key head has so many tiles of rows.
  __device__ __forceinline__ void place(int idx, int row_tiles, int heads_kv) {
    const int head_idx = idx / row_tiles;
    batch_idx = head_idx / heads_kv;
    kv_head_idx = head_idx % heads_kv;
    row_tile = first_row_tile() + idx % row_tiles;
  }

  /// Rows without keys have a tile too, of which nothing is loaded: somebody has to write their zeros.
  __device__ __forceinline__ int find_tiles(const AttentionArgs& args, const tile::Sequence& sequence) {
    const Tokens tokens = tokens_of(sequence, row_tile);
    seen = tile::Score<features>(args, sequence, 0).keys_of_any(tokens.begin, tokens.end);
    if (seen.begin >= seen.end) seen = {0, 0};
    first_tile = seen.begin / config.block_kv;
    end_tile = tile::max(first_tile + 1, tile::ceil_div(seen.end, config.block_kv));
    only_rows = row_tiles_of(sequence) == 1;
    return end_tile - first_tile;
  }
};

}  // namespace flash_attention::decode
