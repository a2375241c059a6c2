#pragma once

#include "ptx/shared.cuh"
#include "tile/tile_map.cuh"

// Which tiles of 64 queries and 64 keys the masks show, before the kernel that attends: abi/tile_map.h.
//
// A block takes 32 tiles of keys and 64 rows of tiles. What the hidden rows of 64 keys have in common is found first, a
// warp for 64 keys; then a warp takes a row of tiles, a lane one tile, and a vote makes the words.

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct MaskMap {
  static constexpr Features features = config.features;
  static constexpr int rows_of_block = 64;

  struct SharedStorage {
    KeyBounds bounds[32];
  };

  const AttentionArgs& args;
  const tile::Sequence sequence;
  const tile::MaskData<features> data;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  /// What the keys of a unit have in common, in all lanes.
  __device__ __forceinline__ KeyBounds bounds_of(int unit) const {
    KeyBounds bounds = no_bounds();
    for (int key = unit * mask_unit + lane; key < tile::min((unit + 1) * mask_unit, sequence.rows_kv); key += 32) {
      take_key(bounds, data.rows + key * features.hidden_bounds, features.hidden_bounds);
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const auto other = [&](int value) { return ptx::shuffle_xor(value, distance); };
        bounds.begin_max[which] = tile::max(bounds.begin_max[which], other(bounds.begin_max[which]));
        bounds.end_max[which] = tile::max(bounds.end_max[which], other(bounds.end_max[which]));
        bounds.begin_min[which] = tile::min(bounds.begin_min[which], other(bounds.begin_min[which]));
        bounds.end_min[which] = tile::min(bounds.end_min[which], other(bounds.end_min[which]));
      }
    }
    return bounds;
  }

  /// What a mask program leaves of the rows [first, last] and the keys of a unit, from intervals (abi/interval.h).
  __device__ __forceinline__ TileClass program_of(int first, int last, int unit, TileClass found) const {
    if (found == TileClass::none) return found;
    const int key = unit * mask_unit;
    const auto seen = data.program.seen(first, last + 1, key, tile::min(key + mask_unit, sequence.rows_kv));
    return !seen.can_be_true ? TileClass::none : seen.can_be_false ? TileClass::partial : found;
  }

  /// What a block mask says of the rows [first, last] and the keys of a unit.
  __device__ __forceinline__ TileClass blocks_of(int first, int last, int unit) const {
    const int key_last = tile::min((unit + 1) * mask_unit, sequence.rows_kv) - 1;
    bool some = false, all = true;
    for (int i = first / data.block_q; i <= last / data.block_q; ++i) {
      for (int j = unit * mask_unit / data.block_kv; j <= key_last / data.block_kv; ++j) {
        const bool visible = data.blocks[i * data.blocks_stride + j] != 0;
        some = some || visible;
        all = all && visible;
      }
    }
    return !some ? TileClass::none : all ? TileClass::full : TileClass::partial;
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void mask_map(const AttentionArgs& args) {
  using Map = MaskMap<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Map::SharedStorage>();
  const int words = map_words(args.seq_kv);
  const int row_blocks = tile::ceil_div(args.seq_q, mask_unit * Map::rows_of_block);
  int index = static_cast<int>(blockIdx.x);
  const int word = index % words;
  index /= words;
  const int row_begin = index % row_blocks * Map::rows_of_block;
  index /= row_blocks;
  const int head_idx = index % args.map_heads * (args.heads_q / args.map_heads), batch_idx = index / args.map_heads;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  const Map map{args, sequence, {args, sequence, head_idx}};
  const tile::TileMap<features> to(args, sequence, head_idx);
  const int unit = 32 * word + map.lane;
  const bool exists = unit * mask_unit < sequence.rows_kv;

  KeyBounds bounds{};
  if constexpr (features.hidden_bounds != 0) {
#pragma unroll 1
    for (int n = map.warp; n < 32; n += config.num_warps) {
      const KeyBounds found = map.bounds_of(32 * word + n);
      if (map.lane == 0) storage.bounds[n] = found;
    }
    __syncthreads();  // the bounds of all units are there
    bounds = storage.bounds[map.lane];
  }
#pragma unroll 1
  for (int row = row_begin + map.warp; row < row_begin + Map::rows_of_block; row += config.num_warps) {
    const int first = row * mask_unit, last = tile::min(first + mask_unit, sequence.rows_q) - 1;
    if (first > last) break;
    TileClass found = exists ? TileClass::full : TileClass::none;
    if constexpr (features.hidden_bounds != 0) {
      if (exists) found = class_of(bounds, first, last);
    }
    if constexpr (features.block_mask) {
      if (found != TileClass::none) {
        const TileClass blocks = map.blocks_of(first, last, unit);
        if (blocks != TileClass::full) found = blocks;
      }
    }
    if constexpr (features.mask_program) found = map.program_of(first, last, unit, found);
    const TileWords words_of_row{ptx::ballot(found != TileClass::none), ptx::ballot(found == TileClass::full)};
    if (map.lane == 0) to.rows[row * words + word] = words_of_row;
  }
}

}  // namespace flash_attention
