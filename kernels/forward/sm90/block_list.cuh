#pragma once

// Which blocks of keys a tile visits where hidden rows or a block mask choose: those of which the map of tiles
// (abi/tile_map.h) shows something, in the order of Shape::forwards. The producer warp follows the map; the warpgroups
// are told with each K.

#include "forward/sm90/shape.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct BlockList {
  using S = Shape<config>;
  static constexpr int units = S::block_kv / mask_unit;  // of a block
  static_assert(!S::listed || S::block_kv % mask_unit == 0, "the planner gives masks blocks of whole units");

  const TileWords* rows;
  int words;
  int num_rows;  // of tiles, that the tile has
  const Blocks&
      seen;    // in the tile: [begin, end) may be listed, [interior_begin, interior_end) need no test but the masks'
  int loaded;  // the word that is in `found`
  TileWords found;

  /// From the word that the tile remembers on.
  __device__ __forceinline__ BlockList(const AttentionArgs& args, const Tile& tile)
      : seen(tile.seen[0]),
        loaded(tile.seen[1].begin),
        found{static_cast<unsigned>(tile.seen[1].interior_begin), static_cast<unsigned>(tile.seen[1].interior_end)} {
    const tile::TileMap<config.features> map(args, tile.sequence, tile.head_idx);
    words = map.words;
    rows = map.rows + tile.q_begin / mask_unit * words;
    num_rows = tile::min(S::row_groups, map.last_row + 1 - tile.q_begin / mask_unit);
  }

  /// What a tile remembers of a list: the word that was loaded last, or none.
  __device__ __forceinline__ static Blocks nothing_loaded() { return {-1, 0, 0, 0}; }
  __device__ __forceinline__ Blocks last_word() const {
    return {loaded, static_cast<int>(found.seen), static_cast<int>(found.full), 0};
  }

  /// The first listed block from `block` on, or -1.
  __device__ __forceinline__ int seek(int block) {
    constexpr int step = S::forwards ? 1 : -1, blocks_of_word = 32 / (units > 0 ? units : 1);
#pragma unroll 1
    while (block >= seen.begin && block < seen.end) {
      load(block * units / 32);
      if ((bits(found.seen, block)) != 0) return block;
      const int word_begin = block / blocks_of_word * blocks_of_word;
      if (found.seen == 0) {
        block = S::forwards ? word_begin + blocks_of_word : word_begin - 1;
      } else {
        block += step;
      }
    }
    return -1;
  }
  __device__ __forceinline__ int after(int block) { return seek(S::forwards ? block + 1 : block - 1); }

  /// `block` was found last.
  __device__ __forceinline__ ListedBlock describe(int block, Attempt attempt) const {
    constexpr unsigned whole = (1u << units) - 1;
    const bool masked = bits(found.full, block) != whole;
    const bool full = !masked && block >= seen.interior_begin && block < seen.interior_end;
    return {block, !full, (!full && !S::keeps_tested) || attempt != Attempt::fixed_max, masked};
  }

 private:
  __device__ __forceinline__ static unsigned bits(unsigned word, int block) {
    return word >> block * units % 32 & ((1u << units) - 1);
  }

  __device__ __forceinline__ void load(int word) {
    if (word == loaded) return;
    loaded = word;
    found = {0, 0xffffffffu};
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row) {
      const TileWords here = rows[row * words + word];
      found.seen |= here.seen;
      found.full &= here.full;
    }
  }
};

}  // namespace flash_attention::forward_sm90
