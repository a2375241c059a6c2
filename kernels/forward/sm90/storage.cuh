#pragma once

// The shared memory and barriers of forward/sm90, and the data that its warps exchange through them: tiles, KV blocks, mask
// bits.

#include "abi/tile_map.h"
#include "forward/sm90/shape.cuh"
#include "mask/words.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/pipeline.cuh"

namespace flash_attention::forward_sm90 {

/// A tile is nearly always processed once. Each attempt detects the tiles that need the next one.
enum class Attempt : int {
  fixed_max = 0,       // the maximum of the first blocks is used for all; fails if a row sum leaves the range of the types
  online_max = 1,      // every block raises the maximum; fails if V is not finite at a key that a row does not see
  nonfinite_safe = 2,  // in addition, NaN and Inf in V are added only to rows that see them
};

/// What the consumer warpgroups do with a tile.
enum class Work : int { none, write_zeros, attend, attend_nonfinite_safe };  // none: the attempt is over

/// If masks choose the blocks (Shape::listed): a KV block of which they show something, with bits for each group of 64
/// rows.
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

/// The same for one group of rows. In addition: whether a tested block raises the maximum.
template <bool keeps_tested>
struct SeenBlock {
  ListedBlock listed;  // the group's bits are shifted to the first place: one register holds all

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

/// The KV blocks that a warpgroup visits, counted in the order in which the tile's blocks are loaded:
///
///     begin .. interior_begin .. interior_end .. end
///     edge     interior          edge
///
/// Every query of the warpgroup sees every key of an interior block; in edge blocks each score is tested.
struct Blocks {
  int begin, interior_begin, interior_end, end;
};

/// If masks choose the blocks: the range from which they choose. Within [interior_begin, interior_end) only the masks hide
/// scores. map_row is the tile's first row in the map. `first` holds each row group's word of the map with the first block,
/// so that reading the list begins without a load.
struct ListPlace {
  Blocks range;
  abi::TileWords found[3];
  unsigned map_row;  // in words of the map
  int row_tile;      // of the precomputed mask bits: mask/words.cuh
  int kv_head;
};

/// If a separate warp finds the tiles and their blocks: what it passes to the warp that loads.
template <bool present>
struct FinderStorage {
  static constexpr int places = 3;
  ptx::Mbarrier tile_found, tile_taken;       // the next tile is written; the tile is published
  ptx::Mbarrier full[places], empty[places];  // of a ring
  int blocks[places];                         // ListedBlock::word
};
template <>
struct FinderStorage<false> {};

constexpr int mask_warps = 3;  // of the producer warpgroup, which compute mask bits

/// Which pairs of a tested block are visible, by warpgroup and row.
template <bool present, int warpgroups, int rows, int block_kv>
struct MaskStorage {
  ptx::Mbarrier full[warpgroups], empty[warpgroups];  // as for the other rings; this one has a single place
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
  int first, blocks;  // the blocks that any warpgroup sees; they are loaded, beginning with `first` (see block_at)
  union {
    struct {
      Blocks seen[3];  // by each warpgroup
      int split;       // the part of the keys, if they are split
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

constexpr int tile_stages = 4;  // at most three tiles are loaded, processed and finished at a time
/// Biases, if TMA loads them.
template <ForwardConfig config>
struct BiasTiles {};
template <ForwardConfig config>
requires(Shape<config>::bias_stages > 0) struct BiasTiles<config> {
  using S = Shape<config>;
  unsigned short biases[S::bias_stages][S::warpgroups][S::block_kv / S::bias_keys][wg_rows * S::bias_keys];
};

/// In the fixed order: what of the totals does not fit in the memory of O (ordered_loop.cuh), by warpgroup.
template <int bytes, int warpgroups>
struct TotalsStorage {
  alignas(16) unsigned char of[warpgroups][bytes / warpgroups];
};
template <int warpgroups>
struct TotalsStorage<0, warpgroups> {};

template <ForwardConfig config>
struct alignas(1024) SharedStorage : BiasTiles<config> {
  using S = Shape<config>;
  using Element = typename S::Element;

  // Tiles are chunks of 64 columns; a chunk is rows of 128 bytes whose 16-byte pieces are swizzled by the row.
  Element Q[S::q_stages][S::warpgroups][S::chunks][wg_rows * chunk_dim];
  Element K[S::stages][S::chunks][S::block_kv * chunk_dim];
  Element V[S::stages][S::chunks_v][S::block_kv * chunk_dim];
  Element O[S::warpgroups][S::o_chunks][wg_rows * chunk_dim];  // before its store; behind it the rest of SegmentTotals
  [[no_unique_address]] TotalsStorage<S::totals_bytes, S::warpgroups> totals;

  // full: the data has landed. empty: every warpgroup that reads the stage has finished with it.
  ptx::Mbarrier Q_full[S::q_stages][S::warpgroups], Q_empty[S::q_stages][S::warpgroups];
  ptx::Mbarrier K_full[S::stages], K_empty[S::stages];
  ptx::Mbarrier V_full[S::stages], V_empty[S::stages];
  ptx::Mbarrier bias_full[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];
  ptx::Mbarrier bias_empty[S::bias_stages > 0 ? S::bias_stages : 1][S::bias_stages > 0 ? S::warpgroups : 1];

  Tile tiles[tile_stages];             // valid when Q_full completes
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
  Element O[S::warpgroups][S::o_chunks][wg_rows * chunk_dim];  // P of two blocks, half of the keys each; O before its store

  ptx::Mbarrier Q_full[S::q_stages][S::row_groups], Q_empty[S::q_stages][S::row_groups];
  ptx::Mbarrier KV_full[S::stages], KV_empty[S::stages];
  ptx::Mbarrier P_full, P_empty;
  ptx::Mbarrier cluster_sync;  // both blocks of a cluster arrive

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

/// Named barriers. `pingpong` and `warpgroup` are the first of several: one for each warpgroup.
enum Barrier : int { barrier_all = 0, barrier_pingpong = 1, barrier_warpgroup = 4, barrier_attend = 7 };

using tile::PipelineState;

/// Called by one thread, before any other thread waits.
template <typename S, typename Storage>
__device__ __forceinline__ void init_barriers(Storage& shared) {
  for (int s = 0; s < S::q_stages; ++s) {
    for (int w = 0; w < S::row_groups; ++w) {
      ptx::mbarrier_init(shared.Q_full[s][w], 1);
      // The warps that compute mask bits read the tile, too. They arrive at the first warpgroup's barrier.
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
