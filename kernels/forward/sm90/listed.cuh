#pragma once

// What the warps of forward/sm90 tell each other of tiles and blocks, above all if masks choose them (Shape::listed).

#include "abi/tile_map.h"
#include "mask/words.cuh"
#include "ptx/mbarrier.cuh"

namespace flash_attention::forward_sm90 {

/// How often a tile is done. Nearly always once; each attempt finds the tiles that need the next.
enum class Attempt : int {
  fixed_max = 0,   // the maximum of the first blocks serves all; wrong where a row sum leaves the range of the types
  online_max = 1,  // the maximum is raised with every block; wrong where V is not finite at a key that a row does not see
  nonfinite_safe = 2,  // as before, and what is not finite in V is added only to the rows that see it
};

/// What the warpgroups do with a tile.
enum class Work : int { none, write_zeros, attend, attend_nonfinite_safe };  // none: the attempt is over

/// A block of keys that the masks show something of, if they choose (Shape::listed): of a tile, with bits for each
/// group of 64 rows.
struct ListedBlock {
  int word = 0;

  __device__ __forceinline__ ListedBlock() = default;
  __device__ __forceinline__ ListedBlock(int block, bool edge, bool raises, unsigned seen, unsigned masked)
      : word(block * 512 + (edge ? 2 : 0) + (raises ? 4 : 0) + static_cast<int>(seen * 8 + masked * 64)) {}

  __device__ __forceinline__ static ListedBlock of(int word) {
    ListedBlock listed;
    listed.word = word;
    return listed;
  }

  static constexpr int last = 1;

  __device__ __forceinline__ int block() const { return word / 512; }
  __device__ __forceinline__ bool is_last() const { return (word & last) != 0; }  // of the tile
  __device__ __forceinline__ bool at_edge() const { return (word & 2) != 0; }     // of a window or of the keys
  __device__ __forceinline__ bool always_raises() const { return (word & 4) != 0; }
  __device__ __forceinline__ bool is_seen(int group) const { return (word >> group & 8) != 0; }
  __device__ __forceinline__ bool is_masked(int group) const { return (word >> group & 64) != 0; }
};

/// The same for one group of rows, and whether a tested block raises the maximum.
template <bool keeps_tested>
struct SeenBlock {
  ListedBlock listed;  // with the bits of the group in the first place: all is one register

  __device__ __forceinline__ static SeenBlock of(int word, int group) {
    constexpr int all_groups = 63 * 8;
    SeenBlock block;
    block.listed.word = (word & ~all_groups) | (word >> group & (8 | 64));
    return block;
  }
  __device__ __forceinline__ int block() const { return listed.block(); }
  __device__ __forceinline__ bool is_last() const { return listed.is_last(); }
  __device__ __forceinline__ bool is_seen() const { return listed.is_seen(0); }
  __device__ __forceinline__ bool masked() const { return listed.is_masked(0); }  // the masks may hide some pair
  __device__ __forceinline__ bool at_edge() const { return listed.at_edge(); }
  __device__ __forceinline__ bool tested() const { return masked() || at_edge(); }
  __device__ __forceinline__ bool raises() const { return listed.always_raises() || (tested() && !keeps_tested); }
};

/// The blocks of keys that a warpgroup visits, counted in the order in which the tile's blocks are loaded:
///
///     begin .. interior_begin .. interior_end .. end
///     edge     interior          edge
///
/// Every query of the warpgroup sees every key of an interior block; in edge blocks each score is tested.
struct Blocks {
  int begin, interior_begin, interior_end, end;
};

/// If masks choose: the range they choose from, in which [interior_begin, interior_end) need no test but the masks', where
/// the map has the tile's first row, and of each row the word with the first block, so that those who follow the list begin
/// without a load.
struct ListPlace {
  Blocks range;
  abi::TileWords found[3];
  unsigned map_row;  // in words of the map
  int row_tile;      // of the words that were made before: mask/words.cuh
  int kv_head;
};

/// If a warp of its own finds the tiles and their blocks: between it and the warp that loads.
template <bool present>
struct FinderStorage {
  static constexpr int places = 3;
  ptx::Mbarrier tile_found, tile_taken;       // the next tile is in its place; it is published
  ptx::Mbarrier full[places], empty[places];  // of a ring
  int blocks[places];                         // ListedBlock::word
};
template <>
struct FinderStorage<false> {};

constexpr int mask_warps = 3;  // of the producer warpgroup: they make the words

/// Which pairs of a tested block are visible, by warpgroup and row.
template <bool present, int warpgroups, int rows, int block_kv>
struct MaskStorage {
  ptx::Mbarrier full[warpgroups], empty[warpgroups];  // as of the other rings, which are longer
  mask::Words<block_kv> words[warpgroups][rows];
};
template <int warpgroups, int rows, int block_kv>
struct MaskStorage<false, warpgroups, rows, block_kv> {};

/// A unit of the scheduler, as a block remembers it: next to words of masks there is little room.
template <bool is_small>
struct UnitNumberOf {
  using Type = int;
};
template <>
struct UnitNumberOf<true> {
  using Type = unsigned short;
};
template <bool is_small>
using UnitNumber = typename UnitNumberOf<is_small>::Type;

}  // namespace flash_attention::forward_sm90
