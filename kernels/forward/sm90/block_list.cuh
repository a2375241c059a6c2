#pragma once

// Which blocks of keys a tile visits where hidden rows or a block mask choose: those of which the map of tiles
// (abi/tile_map.h) shows something, in the order of Shape::forwards. The producer warp follows the map; the warpgroups
// are told with each K.

#include "forward/sm90/shape.cuh"
#include "ptx/bits.cuh"

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
      seen;  // in the tile: [begin, end) may be listed, [interior_begin, interior_end) need no test but the masks'

  __device__ __forceinline__ BlockList(const AttentionArgs& args, const Tile& tile) : seen(tile.seen[0]) {
    const tile::TileMap<config.features> map(args, tile.sequence, tile.head_idx);
    words = map.words;
    rows = map.rows + tile.q_begin / mask_unit * words;
    num_rows = tile::min(S::row_groups, map.last_row + 1 - tile.q_begin / mask_unit);
  }

  /// The first listed block from `block` on, or -1.
  __device__ __forceinline__ int seek(int block) const {
    constexpr int blocks_of_word = 32 / (units > 0 ? units : 1);
#pragma unroll 1
    while (block >= seen.begin && block < seen.end) {
      // Read again for every block: this warp has few registers, and the words are near.
      unsigned found = 0;
#pragma unroll 1
      for (int row = 0; row < num_rows; ++row) found |= rows[row * words + block * units / 32].seen;
      if constexpr (units == 2) found = (found | found >> 1) & 0x55555555u;  // a bit a block
      const int word_begin = block / blocks_of_word * blocks_of_word, bit = (block - word_begin) * units;
      const unsigned left = S::forwards ? found >> bit : found << (31 - bit);
      if (left != 0) {
        if constexpr (S::forwards) {
          block += ptx::trailing_zeros(left) / (units > 0 ? units : 1);
        } else {
          block -= ptx::leading_zeros(left) / (units > 0 ? units : 1);
        }
        return block >= seen.begin && block < seen.end ? block : -1;
      }
      block = S::forwards ? word_begin + blocks_of_word : word_begin - 1;
    }
    return -1;
  }
  __device__ __forceinline__ int after(int block) const { return seek(S::forwards ? block + 1 : block - 1); }

  __device__ __forceinline__ ListedBlock describe(int block, Attempt attempt) const {
    constexpr unsigned whole = (1u << units) - 1;
    unsigned full = whole;
    int classes = 0;
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row) {
      const TileWords here = rows[row * words + block * units / 32];
      full &= bits(here.full, block);
      if constexpr (config.features.mask_bits != 0) {
        static_assert(S::warpgroups <= 2 && units <= 2, "ListedBlock has room for two of two");
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
          const unsigned both = (bits(here.seen, block) >> unit & 1) | (bits(here.full, block) >> unit & 1) << 1;
          classes |= static_cast<int>(both) << (4 * row + 2 * unit);
        }
      }
    }
    const bool open = full == whole && block >= seen.interior_begin && block < seen.interior_end;
    return {block, !open, !open || attempt != Attempt::fixed_max, classes};
  }

 private:
  __device__ __forceinline__ static unsigned bits(unsigned word, int block) {
    return word >> block * units % 32 & ((1u << units) - 1);
  }
};

}  // namespace flash_attention::forward_sm90
