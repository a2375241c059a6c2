#pragma once

// Words and map of masks with a boolean one among them, whose bytes are read once: the words of all blocks are made, and
// they say what each tile is.

#include "mask/word_maker.cuh"

namespace flash_attention::mask {

/// How the warps of a block share 32 tiles of 64 keys and block_q rows: some rows each, and of those every so many block.
template <int block_q, int num_warps>
struct WarpsOfWords {
  static constexpr int rows = 32;                        // of a warp
  static constexpr int rows_ahead = 16;                  // of which bytes are on their way
  static constexpr int row_groups = block_q / rows;      // that have different warps
  static constexpr int takers = num_warps / row_groups;  // warps that share the blocks of a row group
  static constexpr int row_tiles = block_q / abi::mask_unit;
  static_assert(block_q % abi::mask_unit == 0 && num_warps % row_groups == 0);
};

/// What the words of 32 rows, one a lane, say of the tiles of a block of keys: bits from 0 on.
template <int block_kv>
__device__ __forceinline__ abi::TileWords tiles_of(const Words<block_kv>& words) {
  constexpr int units = block_kv / abi::mask_unit, lanes = 32 / units;
  unsigned some = 0, all = 0xffffffffu;
#pragma unroll
  for (int k = 0; k < block_kv / 32; ++k) some |= words[k], all &= words[k];
  abi::TileWords result{};
#pragma unroll
  for (int unit = 0; unit < units; ++unit) {
    const unsigned keys = 0xffffffffu >> (32 - lanes) << unit * lanes;
    result.seen |= ptx::any((some & keys) != 0) ? 1u << unit : 0u;
    result.full |= ptx::all((all & keys) == keys) ? 1u << unit : 0u;
  }
  return result;
}

/// Makes this warp's words of the tiles from 32 * map_word on and the rows [q_begin, q_begin + block_q), and returns what
/// its rows say of the tiles: those of other warps are full and not seen, those that are not there neither.
template <abi::Features features, int block_q, int block_kv, int num_warps>
__device__ __forceinline__ abi::TileWords make_all_words(const abi::AttentionArgs& args, const tile::Sequence& sequence,
                                                         int head_idx, int q_begin, int map_word) {
  using Warps = WarpsOfWords<block_q, num_warps>;
  constexpr int units = block_kv / abi::mask_unit, blocks = 32 / units;
  abi::TileWords found{0, 0xffffffffu};
  if (q_begin >= sequence.len_q) return found;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = q_begin + warp % Warps::row_groups * Warps::rows;
  const WordMaker<features, block_kv, Warps::rows, Warps::rows_ahead> maker{
      args, sequence, head_idx, lane, {args, sequence, head_idx}};
  const auto own = maker.row_at(first + lane);
  const int row_tile = row_tile_of_words<block_q>(args, sequence.batch_idx, head_idx, q_begin);
  const tile::TileRange range =
      tile::Visibility<features>(args, sequence, head_idx).template key_tiles<block_q, block_kv>(q_begin);
#pragma unroll 1
  for (int n = warp / Warps::row_groups; n < blocks; n += Warps::takers) {
    const int block = map_word * blocks + n;
    abi::TileWords tiles{};
    if (block >= range.begin && block < range.end) {
      ptx::path<"mask/tile_map words of bytes">();
      const auto words = maker.words(maker.keys_at(block * block_kv), own, first);
      ptx::store_global(made_words<block_q, block_kv>(args, row_tile, block) + (first - q_begin) + lane, words);
      const unsigned inside = block * block_kv + abi::mask_unit < sequence.rows_kv ? 3u : 1u;  // tiles that are there
      tiles = tiles_of<block_kv>(words);
      tiles.seen &= inside, tiles.full &= inside;
    }
    found.seen |= tiles.seen << n * units;
    found.full &= ~((~tiles.full & ((1u << units) - 1)) << n * units);
  }
  return found;
}

}  // namespace flash_attention::mask
