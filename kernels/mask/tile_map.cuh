#pragma once

#include "abi/key_bounds.h"
#include "mask/bytes.cuh"
#include "mask/program_rows.cuh"
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"
#include "tile/tile_map.cuh"

// Classifies tiles of 64 queries and 64 keys by the masks, before the kernel that attends: abi/tile_map.h.
//
// A block takes 32 tiles of keys and 8 rows of tiles. If it makes words of masks it takes fewer rows, so that many SMs
// take part:
//
//     for each tile of keys, by a warp:    bounds of the hidden rows of its 64 keys                bounds_of
//     for each tile of keys, by a warp:    the range of a program's tensors there                  keep_seen_keys
//     for each row of tiles, by a warp:    a lane classifies one tile: none, partial or full       class_at
//       two votes make the words of the row: seen, full
//     [the same words by columns, for the backward pass]
//     [for each partial block, for 32 rows, by a warp: a bit for each pair]                        words.cuh
//
// With a boolean mask and words: first the words of all blocks, from which the map follows         bytes.cuh
// or, if it is the only mask, rows of bytes, 16 a lane                                            bytes.cuh
// A program as the only mask, with words: a row tile at a time                                    program_rows.cuh
//
// This launch also sets the counter to 0 by which the next launch takes its tiles (dynamic_scheduler).

namespace flash_attention::mask {

// The common bounds of the hidden rows of the keys of a unit.

/// For the unit's keys among rows_kv; all lanes of a warp get the result. `rows` are the hidden rows of the first key.
template <int hidden_bounds>
__device__ __forceinline__ abi::KeyBounds bounds_of(const int* rows, int unit, int rows_kv) {
  abi::KeyBounds bounds = abi::no_bounds();
  const int end = tile::min((unit + 1) * abi::mask_unit, rows_kv);
  for (int key = unit * abi::mask_unit + static_cast<int>(threadIdx.x) % 32; key < end; key += 32)
    take_key(bounds, rows + key * hidden_bounds, hidden_bounds);
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

}  // namespace flash_attention::mask

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct MaskMap {
  static constexpr Features features = config.features;
  static constexpr bool makes_words = config.block_kv != 0;
  static constexpr MapBytes from_bytes = map_bytes(features, makes_words);
  static constexpr int byte_rows = from_bytes == MapBytes::beside ? config.block_q / mask_unit : max_map_rows;
  static constexpr int byte_parts = features.mask && from_bytes != MapBytes::alone ? config.num_warps / byte_rows : 1;
  using SeenKeys = typename tile::Program<features.mask_program>::SeenKeys;
  static_assert(sizeof(SeenKeys) <= seen_keys_bytes, "the planner reserves as much");

  struct SharedStorage {
    KeyBounds bounds[32];
    SeenKeys seen_keys[features.mask_program ? 32 : 1];
    TileWords rows[max_map_rows];
    TileWords bytes[byte_rows][byte_parts];
  };

  /// Classifies a row of tiles by a boolean mask: several warps take some of its 64 rows each.
  __device__ __forceinline__ void class_bytes(SharedStorage& storage, int row_begin, int unit, bool exists) const {
    constexpr int rows = mask_unit / byte_parts;
    const int n = warp / byte_parts, part = warp % byte_parts;
    const int first = (row_begin + n) * mask_unit + part * rows, last = tile::min(first + rows, sequence.rows_q) - 1;
    TileClass found = TileClass::full;  // with no rows
    if (exists && first <= last) found = mask::byte_class(args, sequence, head_idx, first, last, unit);
    const TileWords words{ptx::ballot(found != TileClass::none), ptx::ballot(found == TileClass::full)};
    const bool is_empty = first > last;
    if (lane == 0) storage.bytes[n][part] = is_empty ? TileWords{0, 0xffffffffu} : words;
  }
  __device__ __forceinline__ static TileWords words_of_bytes(const SharedStorage& storage, int n) {
    TileWords words{0, 0xffffffffu};
#pragma unroll
    for (int part = 0; part < byte_parts; ++part) {
      words.seen |= storage.bytes[n][part].seen;
      words.full &= storage.bytes[n][part].full;
    }
    return words;
  }
  __device__ __forceinline__ TileClass class_of_bytes(const SharedStorage& storage, int n) const {
    const TileWords words = words_of_bytes(storage, n);
    if ((words.full >> lane & 1) != 0) return TileClass::full;
    return (words.seen >> lane & 1) != 0 ? TileClass::partial : TileClass::none;
  }

  const AttentionArgs& args;
  const tile::Sequence sequence;
  const int head_idx;
  const tile::MaskData<features> data;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  /// The class of the rows [first, last] and the keys of a unit under a mask program, from intervals (abi/interval.h).
  __device__ __forceinline__ TileClass program_of(int first, int last, int unit, const SeenKeys& keys,
                                                  TileClass found) const {
    if (found == TileClass::none) return found;
    const int key = unit * mask_unit;
    const auto seen = data.program.seen(first, last + 1, key, tile::min(key + mask_unit, sequence.rows_kv), keys);
    return !seen.can_be_true ? TileClass::none : seen.can_be_false ? TileClass::partial : found;
  }

  /// The class of the rows of tile `row` and the keys of a unit that exists. `bytes` is the class by the boolean mask.
  __device__ __forceinline__ TileClass class_at(const KeyBounds& bounds, const SeenKeys& keys, int row, int unit,
                                                TileClass bytes) const {
    const int first = row * mask_unit, last = tile::min(first + mask_unit, sequence.rows_q) - 1;
    TileClass found = TileClass::full;
    if constexpr (features.hidden_bounds != 0) found = class_of(bounds, first, last);
    if constexpr (features.block_mask) {
      if (found == TileClass::none) return found;
      const TileClass blocks = blocks_of(first, last, unit);
      if (blocks != TileClass::full) found = blocks;
    }
    if constexpr (features.mask) {
      if (bytes != TileClass::full && found != TileClass::none) found = bytes;
    }
    if constexpr (features.mask_program) found = program_of(first, last, unit, keys, found);
    return found;
  }

  /// The class of the rows [first, last] and the keys of a unit under a block mask.
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

/// Makes the words of a boolean mask, and from them its map.
template <ForwardConfig config>
__device__ __forceinline__ void map_by_words(const MaskMap<config>& map, const tile::TileMap<config.features>& to,
                                             int row_begin, int word) {
  using Warps = mask::WarpsOfWords<config.block_q, config.num_warps>;
  using Map = MaskMap<config>;
  static_assert(Warps::row_tiles == Map::byte_rows);
  auto& storage = ptx::shared_storage<typename Map::SharedStorage>();
  constexpr int groups_of_tile = Warps::row_groups / Warps::row_tiles;
  const TileWords found = mask::make_all_words<config.features, config.block_q, config.block_kv, config.num_warps>(
      map.args, map.sequence, map.head_idx, row_begin * mask_unit, word);
  const int group = map.warp % Warps::row_groups;
  if (map.lane == 0)
    storage.bytes[group / groups_of_tile][map.warp / Warps::row_groups * groups_of_tile + group % groups_of_tile] = found;
  __syncthreads();  // the map bits of all warps are written
  const int n = static_cast<int>(threadIdx.x), row = row_begin + n;
  if (n < Map::byte_rows && row * mask_unit < map.sequence.rows_q)
    to.rows[row * to.words + word] = map.words_of_bytes(storage, n);
}

template <ForwardConfig config>
__device__ __forceinline__ void map_tiles(const AttentionArgs& args) {
  using Map = MaskMap<config>;
  constexpr Features features = config.features;
  const int words = map_words(args.seq_kv);
  const int rows_of_block = mask_map_rows(Map::makes_words, Map::from_bytes, config.block_q, args.seq_q, args.seq_kv);
  const int row_blocks = mask_map_row_blocks(Map::makes_words, rows_of_block, args.seq_q);
  int index = static_cast<int>(blockIdx.x);
  const int word = index % words;
  index /= words;
  const int row_begin = index % row_blocks * rows_of_block;
  index /= row_blocks;
  const int head_idx = index % args.map_heads * (args.heads_q / args.map_heads), batch_idx = index / args.map_heads;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  const Map map{args, sequence, head_idx, {args, sequence, head_idx}};
  const tile::TileMap<features> to(args, sequence, head_idx);
  if constexpr (Map::from_bytes == MapBytes::beside) return map_by_words(map, to, row_begin, word);
  if constexpr (Map::from_bytes == MapBytes::alone) {
    using Rows = mask::ByteRows<features, config.block_q, config.block_kv, config.num_warps>;
    auto& storage = ptx::shared_storage<typename Rows::SharedStorage>();
    return Rows{args, sequence, head_idx, map.lane, map.warp}.run(storage, row_begin, word,
                                                                  to.rows + row_begin * words + word);
  }
  auto& storage = ptx::shared_storage<typename Map::SharedStorage>();
  const int unit = 32 * word + map.lane;
  const bool exists = unit * mask_unit < sequence.rows_kv;

  KeyBounds bounds{};
  typename Map::SeenKeys seen_keys{};
  if constexpr (features.hidden_bounds != 0) {
#pragma unroll 2
    for (int n = map.warp; n < 32; n += config.num_warps) {
      const KeyBounds found = mask::bounds_of<features.hidden_bounds>(map.data.rows, 32 * word + n, sequence.rows_kv);
      if (map.lane == 0) storage.bounds[n] = found;
    }
  }
  if constexpr (features.mask_program) {
    mask::keep_seen_keys<config.num_warps>(map.data.program, 32 * word, 32, sequence.rows_kv, storage.seen_keys);
  }
  if constexpr (features.mask) map.class_bytes(storage, row_begin, unit, exists);
  if constexpr (features.hidden_bounds != 0 || features.mask_program || features.mask)
    __syncthreads();  // the data of all units, and the classes of all rows by bytes, are written
  if constexpr (features.hidden_bounds != 0) bounds = storage.bounds[map.lane];
  if constexpr (features.mask_program) seen_keys = storage.seen_keys[map.lane];
  constexpr bool by_columns = config.num_stages == 2;  // for backward
#pragma unroll 1
  for (int n = map.warp; n < rows_of_block; n += config.num_warps) {
    const int row = row_begin + n;
    const bool inside = row * mask_unit < sequence.rows_q;
    const TileClass bytes = features.mask ? map.class_of_bytes(storage, n) : TileClass::full;
    const TileClass found = inside && exists ? map.class_at(bounds, seen_keys, row, unit, bytes) : TileClass::none;
    const TileWords words_of_row{ptx::ballot(found != TileClass::none), ptx::ballot(found == TileClass::full)};
    if (map.lane == 0 && inside) to.rows[row * words + word] = words_of_row;
    if (map.lane == 0 && (by_columns || Map::makes_words))
      storage.rows[n] = inside ? words_of_row : TileWords{0, 0xffffffffu};
  }
  if constexpr (!by_columns && !Map::makes_words) return;
  __syncthreads();  // the words of all rows are written
  if constexpr (Map::makes_words) {
    constexpr int rows = config.block_q / mask_unit;  // of a tile of the kernel that reads the words
#pragma unroll 1
    for (int n = 0; n < rows_of_block; n += rows) {
      TileWords found{0, 0xffffffffu};
#pragma unroll
      for (int row = n; row < n + rows; ++row) found.seen |= storage.rows[row].seen, found.full &= storage.rows[row].full;
      mask::make_words<features, config.block_q, config.block_kv, config.num_warps>(
          args, sequence, head_idx, (row_begin + n) * mask_unit, word, found);
    }
    return;
  }

  auto* const columns = reinterpret_cast<unsigned char*>(tile::map_columns<features>(args, sequence, head_idx));
  const int column_bytes = 4 * map_words(args.seq_q);
#pragma unroll 1
  for (int n = map.warp; n < 32; n += config.num_warps) {
    const int column = 32 * word + n;
    if (column * mask_unit >= sequence.rows_kv) break;
    const unsigned seen = storage.rows[map.lane % max_map_rows].seen;
    const unsigned found = ptx::ballot(map.lane < max_map_rows && (seen >> n & 1) != 0);
    if (map.lane == 0) columns[column * column_bytes + row_begin / max_map_rows] = static_cast<unsigned char>(found);
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void mask_map(const AttentionArgs& args) {
  ptx::griddepcontrol_launch_dependents();
  if (config.dynamic_scheduler && blockIdx.x == 0 && threadIdx.x == 0) *static_cast<unsigned*>(args.workspace) = 0;
  if constexpr (map_by_program(config.features, MaskMap<config>::makes_words)) {
    mask::map_program<config>(args);
  } else {
    map_tiles<config>(args);
  }
}

}  // namespace flash_attention
