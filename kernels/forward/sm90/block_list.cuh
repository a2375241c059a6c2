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

  const AttentionArgs& args;
  const Tile& tile;                // what is seldom asked for
  int begin, end;                  // blocks that may be listed
  int loaded;                      // the word that is in `found`; -1: none
  TileWords found[S::row_groups];  // of each row of tiles

  /// No block of the list is known.
  __device__ __forceinline__ BlockList(const AttentionArgs& arguments, const Tile& tile_of_list, int word = -1)
      : args(arguments), tile(tile_of_list), begin(tile.list.range.begin), end(tile.list.range.end), loaded(word) {}

  /// A list that begins with the tile's first block, whose words the tile remembers.
  __device__ __forceinline__ static BlockList from_first(const AttentionArgs& args, const Tile& tile) {
    BlockList list(args, tile, tile.first * units / 32);
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row) list.found[row] = tile.list.found[row];
    return list;
  }

  /// The first listed block from `block` on, or -1.
  __device__ __forceinline__ int seek(int block) {
    constexpr int blocks_of_word = 32 / (units > 0 ? units : 1);
#pragma unroll 1
    while (block >= begin && block < end) {
      const unsigned word = static_cast<unsigned>(block) / blocks_of_word;
      const unsigned place_in_word = static_cast<unsigned>(block) % blocks_of_word * units;
      load(static_cast<int>(word));
      unsigned any = 0;  // tiles from the block on
#pragma unroll
      for (const TileWords& row : found) any |= row.seen;
      any &= S::forwards ? 0xffffffffu << place_in_word : 0xffffffffu >> (32 - units - place_in_word);
      const int word_begin = static_cast<int>(word) * blocks_of_word;
      if (any != 0) {
        const int unit = S::forwards ? ptx::trailing_zeros(any) : 31 - ptx::leading_zeros(any);
        block = word_begin + unit / units;
        return block >= begin && block < end ? block : -1;
      }
      block = S::forwards ? word_begin + blocks_of_word : word_begin - 1;
    }
    return -1;
  }
  __device__ __forceinline__ int after(int block) { return seek(S::forwards ? block + 1 : block - 1); }

  /// `block` was found last.
  __device__ __forceinline__ ListedBlock describe(int block, Attempt attempt) const {
    constexpr unsigned whole = (1u << units) - 1;
    unsigned seen_by = 0, masked_for = 0;
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row) {
      // In Attempt::nonfinite_safe the warpgroups go through the blocks together.
      const bool together = !S::skips_listed || attempt == Attempt::nonfinite_safe;
      seen_by |= bits(found[row].seen, block) != 0 || together ? 1u << row : 0u;
      masked_for |= bits(found[row].full, block) != whole ? 1u << row : 0u;
    }
    const bool edge = block < tile.list.range.interior_begin || block >= tile.list.range.interior_end;
    return {block, edge, attempt != Attempt::fixed_max, seen_by, masked_for};
  }

 private:
  __device__ __forceinline__ static unsigned bits(unsigned word, int block) {
    return word >> block * units % 32 & ((1u << units) - 1);
  }

  __device__ __forceinline__ void load(int word) {
    if (word == loaded) return;
    loaded = word;
    const TileWords* const rows = tile::workspace<TileWords>(args, SharedRegion::masks) + tile.list.map_row;
    const int words = map_words(args.seq_kv);
    const int last_row = (tile.sequence.rows_q - 1) / mask_unit - tile.q_begin / mask_unit;  // of the map, for this tile
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row)
      found[row] = row <= last_row ? rows[row * words + word] : TileWords{0, 0xffffffffu};
  }
};

/// visit(described) for the blocks of a tile.
template <ForwardConfig config, typename Visit>
__device__ __forceinline__ void for_listed(const AttentionArgs& args, const Tile& tile, const Visit& visit) {
  if (tile.sees_nothing()) return;
  auto list = BlockList<config>::from_first(args, tile);
  int block = tile.first;
#pragma unroll 1
  while (block >= 0) {
    ListedBlock described = list.describe(block, tile.attempt);
    block = list.after(block);
    if (block < 0) described.word |= ListedBlock::last;
    visit(described);
  }
}

/// The range that masks choose from, and the first of the blocks. `blocks` of the tile says no more than whether there is
/// one.
template <ForwardConfig config>
__device__ __forceinline__ void list_blocks(const AttentionArgs& args, Tile& tile,
                                            const tile::Score<config.features>& score, tile::TileRange loaded) {
  constexpr Features features = config.features;
  const int q_last = tile::min(tile.q_begin + config.block_q, score.len_q) - 1;
  int first = 0, last = score.visible_kv;
  if constexpr (features.window_right) last = tile::min(last, score.window_end(tile.q_begin));
  if constexpr (features.left_padding) first = score.first_kv;
  if constexpr (features.window_left) first = tile::max(score.window_begin(q_last), first);
  tile.list.range = {loaded.begin, tile::ceil_div(first, config.block_kv), tile::max(last, 0) / config.block_kv,
                     loaded.end};
  tile.list.kv_head = tile.head_idx / args.group;
  const tile::TileMap<features> map(args, tile.sequence, tile.head_idx);
  tile.list.map_row = static_cast<unsigned>(map.rows - tile::workspace<TileWords>(args, SharedRegion::masks)) +
                      tile.q_begin / mask_unit * map.words;
  if constexpr (features.made_words)
    tile.list.row_tile =
        mask::row_tile_of_words<config.block_q>(args, tile.sequence.batch_idx, tile.head_idx, tile.q_begin);
  BlockList<config> list(args, tile);
  tile.first = list.seek(tile.first);
#pragma unroll
  for (int row = 0; row < Shape<config>::row_groups; ++row) tile.list.found[row] = list.found[row];
  tile.blocks = tile.first < 0 ? 0 : 1;
}

}  // namespace flash_attention::forward_sm90
