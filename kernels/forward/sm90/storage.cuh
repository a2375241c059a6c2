#pragma once

// The shared memory and barriers of forward/sm90, and what its warps tell each other through them: tiles, blocks, words of
// masks.

#include "abi/tile_map.h"
#include "forward/sm90/shape.cuh"
#include "mask/words.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/pipeline.cuh"

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

/// A tile of block_q queries of one head.
struct Tile {
  int iteration;
  Attempt attempt;
  Work work;
  int q_begin;
  int head_idx;
  int first, blocks;  // the blocks that any warpgroup sees: they are loaded, from `first` on (see block_at)
  union {
    struct {
      Blocks seen[3];  // by each warpgroup
      int split;       // which part of its keys, if they are split
    };
    ListPlace list;  // if masks choose
  };
  tile::Sequence sequence;

  __device__ __forceinline__ bool sees_nothing() const { return blocks == 0; }
};

/// The n-th block of a tile.
template <ForwardConfig config>
__device__ __forceinline__ int block_at(const Tile& tile, int n) {
  if (Shape<config>::from_diagonal && n > tile.first) return n;
  return Shape<config>::forwards ? tile.first + n : tile.first - n;
}

constexpr int tile_stages = 4;  // one more than the tiles that can be loaded, attended to and finished at a time
/// Biases, where they come by TMA.
template <ForwardConfig config>
struct BiasTiles {};
template <ForwardConfig config>
requires(Shape<config>::bias_stages > 0) struct BiasTiles<config> {
  using S = Shape<config>;
  unsigned short biases[S::bias_stages][S::warpgroups][S::block_kv / S::bias_keys][wg_rows * S::bias_keys];
};

template <ForwardConfig config>
struct alignas(1024) SharedStorage : BiasTiles<config> {
  using S = Shape<config>;
  using Element = typename S::Element;

  // Tiles are chunks of 64 columns; a chunk is rows of 128 bytes whose 16-byte pieces are swizzled by the row.
  Element Q[S::q_stages][S::warpgroups][S::chunks][wg_rows * chunk_dim];
  Element K[S::stages][S::chunks][S::block_kv * chunk_dim];
  Element V[S::stages][S::chunks_v][S::block_kv * chunk_dim];
  Element O[S::warpgroups][S::o_chunks][wg_rows * chunk_dim];  // before its store

  // full: a tile has landed. empty: every warpgroup that reads it is done with it.
  ptx::Mbarrier Q_full[S::q_stages][S::warpgroups], Q_empty[S::q_stages][S::warpgroups];
  ptx::Mbarrier K_full[S::stages], K_empty[S::stages];
  ptx::Mbarrier V_full[S::stages], V_empty[S::stages];
  ptx::Mbarrier bias_full[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];
  ptx::Mbarrier bias_empty[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];

  Tile tiles[tile_stages];             // what Q_full announces
  unsigned char retry[S::tiles_kept];  // see RetryList
  int last_attempt;
  typename S::Unit claimed[config.dynamic_scheduler ? S::tiles_kept : 1];  // the unit of each iteration
  int listed[S::listed ? S::stages : 1];                                   // the ListedBlock of each stage of K
  [[no_unique_address]] MaskStorage<S::makes_words, S::warpgroups, wg_rows, S::block_kv> mask;
  [[no_unique_address]] FinderStorage<S::finds_ahead> finder;
};

/// Wide heads: one ring for K and V.
template <ForwardConfig config>
requires(Shape<config>::wide) struct alignas(1024) SharedStorage<config> {
  using S = Shape<config>;
  using Element = typename S::Element;

  Element Q[S::q_stages][S::row_groups][S::chunks][wg_rows * chunk_dim];
  Element KV[S::stages][forward_sm90_wide_stage_bytes / 2];
  Element O[S::warpgroups][S::o_chunks][wg_rows * chunk_dim];  // P of two blocks, each half of the keys; O before its store

  ptx::Mbarrier Q_full[S::q_stages][S::row_groups], Q_empty[S::q_stages][S::row_groups];
  ptx::Mbarrier KV_full[S::stages], KV_empty[S::stages];
  ptx::Mbarrier P_full, P_empty;
  ptx::Mbarrier cluster_sync;  // by the other block of a cluster

  Tile tiles[tile_stages];
  alignas(4) unsigned char retry[S::tiles_kept];
  int last_attempt;
  typename S::Unit claimed[1];
  int listed[S::listed ? S::stages : 1];
  float exchanged[2][S::warpgroups][wg_rows];  // row statistics for the other warpgroup; the two places alternate
};

template <ForwardConfig config>
constexpr bool fits_layout = sizeof(SharedStorage<config>) == forward_sm90_layout(config).shared_bytes &&
                             sizeof(SharedStorage<config>) <= forward_sm90_max_shared_bytes;

/// Named barriers. `pingpong` and `warpgroup` are followed by one for each warpgroup.
enum Barrier : int { barrier_all = 0, barrier_pingpong = 1, barrier_warpgroup = 4, barrier_attend = 7 };

using tile::PipelineState;

/// By one thread, before any other waits.
template <typename S, typename Storage>
__device__ __forceinline__ void init_barriers(Storage& shared) {
  for (int s = 0; s < S::q_stages; ++s) {
    for (int w = 0; w < S::row_groups; ++w) {
      ptx::mbarrier_init(shared.Q_full[s][w], 1);
      // Those who make words of masks read the tile, too: they say so to the first warpgroup's.
      const int writers = S::makes_words && w == 0 ? mask_warps : 0;
      ptx::mbarrier_init(shared.Q_empty[s][w], S::warpgroups / S::row_groups + writers);
    }
  }
  if constexpr (S::wide) {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.KV_full[s], 1);
      ptx::mbarrier_init(shared.KV_empty[s], S::cluster * S::warpgroups);
    }
    ptx::mbarrier_init(shared.cluster_sync, S::cluster);
    ptx::mbarrier_init(shared.P_full, S::warpgroups * wg_threads / 32);
    ptx::mbarrier_init(shared.P_empty, S::warpgroups);
  } else {
    for (int s = 0; s < S::stages; ++s) {
      ptx::mbarrier_init(shared.K_full[s], 1);
      ptx::mbarrier_init(shared.V_full[s], 1);
      ptx::mbarrier_init(shared.K_empty[s], S::warpgroups);
      ptx::mbarrier_init(shared.V_empty[s], S::warpgroups);
    }
  }
  if constexpr (S::makes_words) {
    for (int w = 0; w < S::warpgroups; ++w) {
      ptx::mbarrier_init(shared.mask.full[w], mask_warps);
      ptx::mbarrier_init(shared.mask.empty[w], wg_threads / 32);
    }
  }
  ptx::mbarrier_init_fence();  // TMA sees the barriers
}

}  // namespace flash_attention::forward_sm90
