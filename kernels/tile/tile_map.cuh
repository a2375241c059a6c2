#pragma once

#include "abi/tile_map.h"
#include "ptx/bits.cuh"
#include "ptx/warp.cuh"
#include "tile/list_bits.cuh"
#include "tile/program.cuh"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

// The masks that are data, applied to a pair of query and key, and to a tile.

namespace flash_attention::tile {

/// The facts that another lane of the warp has about a row or a key.
template <typename Known>
__device__ __forceinline__ Known known_by(const Known& known, int lane) {
  static_assert(sizeof(Known) % 4 == 0, "a shuffle moves 32 bits");
  struct Words {
    unsigned words[sizeof(Known) / 4];
  };
  auto moved = __builtin_bit_cast(Words, known);
#pragma unroll
  for (unsigned& word : moved.words) word = ptx::shuffle(word, lane);
  return __builtin_bit_cast(Known, moved);
}

/// Hidden rows, a block mask, lists of blocks and a mask program, for one sequence and query head.
template <Features features>
struct MaskData {
  static constexpr bool present = features.has_mask_data();

  const int* rows;  // of the sequence's first key
  const unsigned char* blocks;
  long long blocks_stride;
  int block_q, block_kv;
  Program<features.mask_program> program;
  ListBits<features> list;

  __device__ __forceinline__ MaskData(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : program(args, sequence.batch_idx, head_idx), list(args, sequence, head_idx) {
    if constexpr (features.hidden_bounds != 0) {
      rows = args.hidden_rows + sequence.batch_idx * args.hidden_batch_stride +
             head_idx / args.group * args.hidden_head_stride + sequence.start_kv * features.hidden_bounds;
    }
    if constexpr (features.block_mask) {
      blocks = static_cast<const unsigned char*>(args.block_mask.data) + sequence.batch_idx * args.block_mask.batch_stride +
               head_idx * args.block_mask.head_stride;
      blocks_stride = args.block_mask.q_stride;
      block_q = args.mask_block_q;
      block_kv = args.mask_block_kv;
    }
  }

  /// Whether key j is hidden from query i. Only for pairs inside of the sequence. There are no branches: every mask is
  /// evaluated.
  __device__ __forceinline__ bool hides_pair(int i, int j) const {
    bool result = false;
    if constexpr (features.hidden_bounds != 0) result = hides(rows + j * features.hidden_bounds, features.hidden_bounds, i);
    if constexpr (features.block_mask) result |= blocks[i / block_q * blocks_stride + j / block_kv] == 0;
    if constexpr (features.mask_program) result |= !program.visible(program.row(i), program.key(j));
    if constexpr (features.list_bits != 0) result |= !list.shows(i, j);
    return result;
  }
};

/// The map of tiles of one sequence and query head.
template <Features features>
struct TileMap {
  static constexpr bool present = features.has_tile_map();

  TileWords* rows;
  int words;
  int last_row, last_unit;

  __device__ __forceinline__ TileMap(const AttentionArgs& args, const Sequence& sequence, int head_idx) {
    if constexpr (present) {
      words = map_words(args.seq_kv);
      last_row = max(sequence.rows_q - 1, 0) / mask_unit;
      last_unit = max(sequence.rows_kv - 1, 0) / mask_unit;
      const int head = head_idx / (args.heads_q / args.map_heads);
      const long long head_rows = map_rows(features.packed, args.map_batches, args.seq_q, args.total_q);
      const long long row = map_row(features.packed, sequence.batch_idx, args.map_batches, args.seq_q, sequence.start_q);
      rows = workspace<TileWords>(args, SharedRegion::masks) + (head * head_rows + row) * words;
    }
  }

  /// The class of the tile of the queries [q_begin, q_begin + block_q) and the keys [kv_begin, kv_begin + block_kv), as
  /// far as they exist. Both begin inside of the sequence; whole tiles begin at multiples of 64.
  template <int block_q, int block_kv>
  __device__ __forceinline__ TileClass of(int q_begin, int kv_begin) const {
    if constexpr (!present) return TileClass::full;
    if constexpr (block_q == mask_unit && block_kv == mask_unit) {
      const int unit = kv_begin / mask_unit;
      const TileWords word = rows[q_begin / mask_unit * words + unit / 32];
      if ((word.full >> unit % 32 & 1) != 0) return TileClass::full;
      return (word.seen >> unit % 32 & 1) != 0 ? TileClass::partial : TileClass::none;
    }
    const int row_end = min((q_begin + block_q - 1) / mask_unit, last_row);
    const int unit_end = min((kv_begin + block_kv - 1) / mask_unit, last_unit);
    bool some = false, all = true;
    for (int row = q_begin / mask_unit; row <= row_end; ++row) {
      for (int unit = kv_begin / mask_unit; unit <= unit_end; ++unit) {
        const TileWords word = rows[row * words + unit / 32];
        some = some || (word.seen >> unit % 32 & 1) != 0;
        all = all && (word.full >> unit % 32 & 1) != 0;
      }
    }
    return !some ? TileClass::none : all ? TileClass::full : TileClass::partial;
  }
};

/// The tiles of 64 keys of which the masks show something to the queries [q_begin, q_begin + block_q).
template <Features features, int block_q>
struct KeyTileList {
  static constexpr bool present = TileMap<features>::present;

  const TileWords* rows;
  int words, num_rows;

  __device__ __forceinline__ KeyTileList& set(const AttentionArgs& args, const Sequence& sequence, int head_idx,
                                              int q_begin) {
    if constexpr (present) {
      const TileMap<features> map(args, sequence, head_idx);
      words = map.words;
      rows = map.rows + q_begin / mask_unit * words;
      num_rows = min(block_q / mask_unit, map.last_row + 1 - q_begin / mask_unit);
    }
    return *this;
  }

  /// The first listed tile from `tile` on, or `end`.
  __device__ __forceinline__ int seek(int tile, int end) const {
    if constexpr (!present) return tile;
#pragma unroll 1
    while (tile < end) {
      unsigned seen = 0;
#pragma unroll 1
      for (int row = 0; row < num_rows; ++row) seen |= rows[row * words + tile / 32].seen;
      seen >>= tile % 32;
      if (seen != 0) return min(tile + ptx::trailing_zeros(seen), end);
      tile = tile / 32 * 32 + 32;
    }
    return end;
  }
};

/// For each tile of keys of one sequence and query head: which tiles of queries see something of it, map_words(seq_q)
/// words.
template <Features features>
__device__ __forceinline__ unsigned* map_columns(const AttentionArgs& args, const Sequence& sequence, int head_idx) {
  const int head = head_idx / (args.heads_q / args.map_heads);
  const long long head_columns = map_rows(features.packed, args.map_batches, args.seq_kv, args.total_kv);
  const long long column = map_row(features.packed, sequence.batch_idx, args.map_batches, args.seq_kv, sequence.start_kv);
  const long long behind = args.map_heads * map_rows(features.packed, args.map_batches, args.seq_q, args.total_q) *
                           map_words(args.seq_kv) * static_cast<long long>(sizeof(TileWords));
  return reinterpret_cast<unsigned*>(workspace<char>(args, SharedRegion::masks) + behind) +
         (head * head_columns + column) * map_words(args.seq_q);
}

/// Finds the next visible tile in a row or column of tiles. A warp tests 32 tiles at a time, one a lane; all lanes call
/// it together.
struct VisibleTiles {
  int base = -1;      // the first of the tiles that `seen` describes
  unsigned seen = 0;  // a bit a tile

  /// The first visible tile of `tile`, tile + 1, ..., or `end`.
  template <typename IsSeen>
  __device__ __forceinline__ int next(int tile, int end, const IsSeen& is_seen) {
    while (tile < end) {
      test_32_tiles(tile, is_seen);
      const unsigned left = seen >> (tile - base);
      if (left != 0) return min(tile + ptx::trailing_zeros(left), end);
      tile = base + 32;
    }
    return end;
  }

  /// The first visible tile of `tile`, tile - 1, ..., or `begin` - 1.
  template <typename IsSeen>
  __device__ __forceinline__ int previous(int tile, int begin, const IsSeen& is_seen) {
    while (tile >= begin) {
      test_32_tiles(tile, is_seen);
      const unsigned left = seen << (31 - (tile - base));
      if (left != 0) return max(tile - ptx::leading_zeros(left), begin - 1);
      tile = base - 1;
    }
    return begin - 1;
  }

 private:
  template <typename IsSeen>
  __device__ __forceinline__ void test_32_tiles(int tile, const IsSeen& is_seen) {
    if (base == tile / 32 * 32) return;
    base = tile / 32 * 32;
    seen = ptx::ballot(is_seen(base + static_cast<int>(threadIdx.x % 32)));
  }
};

}  // namespace flash_attention::tile
