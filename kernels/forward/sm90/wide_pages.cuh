#pragma once

// K and V of wide heads from pages. A stage of K is a box for each page of the block, or for each `page_rows` keys of one;
// a stage of V lies in one page. The lane that loads has no time to look up pages when a stage is free: it does so for the
// next block before it loads V of the last one, and keeps what it found in registers if that is little.

#include "forward/sm90/schedule.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90 {

constexpr unsigned short both_blocks = 3;  // mask of a cluster's two blocks, for a multicast

template <ForwardConfig config>
struct WidePages {
  using S = Shape<config>;
  static constexpr int rows = config.page_rows, boxes = S::block_kv / rows;
  // A lane has registers for the pages of a block of K and, where they are few, for those of the block of V behind it. Else
  // entries are read again where they are used; they are in L1. An array is indexed by constants alone, to be in registers.
  static constexpr bool holds_keys = boxes <= 8, holds_values = boxes <= 2;
  static_assert(rows % S::value_rows == 0 && S::block_kv % rows == 0, "the planner refuses smaller pages");

  /// A block of keys.
  struct Place {
    const int* entry;  // of the page table, for the block's first box
    int row;           // of its page
    int first, end;    // boxes, counted from there, that have a key which some query of the tile sees
    int pages[holds_values ? boxes : 1];

    /// If no query sees a key of the box, the table's entry may be anything and is not read; the box gets a coordinate
    /// outside of the tensor, which TMA reads as zeros.
    __device__ __forceinline__ int look_up(int box, const int* its_entry) const {
      return box >= first && box < end ? *its_entry : -1;
    }
  };

  Place place{};  // of the block whose K is loaded next
  int pages[holds_keys ? boxes : 1];
  int kv_head = 0;

  /// The first block of a tile.
  __device__ __forceinline__ void begin(const AttentionArgs& args, const Tile& tile, int block) {
    const tile::Visibility<config.features> sight(args, tile.sequence, tile.head_idx);
    const int q_begin = tile.q_begin / config.block_q * config.block_q;  // of both blocks of a cluster
    const tile::KeyRange seen = sight.keys_of_any(q_begin, q_begin + config.block_q);
    const int kv_begin = block * S::block_kv, page = kv_begin / args.page_size;
    kv_head = tile.head_idx / args.group;
    place.entry = args.page_table + tile.sequence.batch_idx * args.page_table_stride + page;
    place.row = kv_begin - page * args.page_size;
    place.first = seen.begin / rows - kv_begin / rows;
    place.end = tile::ceil_div(seen.end, rows) - kv_begin / rows;
    find_pages(args);
  }

  /// On to the next block of the tile, if there is one; returns the block before.
  __device__ __forceinline__ Place advance(const AttentionArgs& args) {
    constexpr int step = S::forwards ? 1 : -1;
    const Place before = place;
    place.row += step * S::block_kv;
    place.first -= step * boxes;
    place.end -= step * boxes;
#pragma unroll 1
    for (; S::forwards && place.row >= args.page_size; place.row -= args.page_size) ++place.entry;
#pragma unroll 1
    for (; !S::forwards && place.row < 0; place.row += args.page_size) --place.entry;
    find_pages(args);
    return before;
  }

  /// 64 columns of K. The blocks of a cluster load a half for both: a box each.
  __device__ __forceinline__ void load_keys(const AttentionArgs& args, typename S::Element* to, ptx::Mbarrier& full,
                                            int chunk) const {
    if constexpr (S::cluster > 1) {
      static_assert(S::cluster == 1 || boxes == 2);
      const int rank = static_cast<int>(ptx::cluster_rank());
      const int row = rank == 0 ? place.row : place.row + rows < args.page_size ? place.row + rows : 0;
      ptx::tma_multicast_4d(to + rank * rows * chunk_dim, args.maps[map_K], full, both_blocks, chunk * chunk_dim, row,
                            kv_head, rank == 0 ? pages[0] : pages[boxes - 1]);
      return;
    }
    for_boxes<holds_keys>(args, place, [&](int box, int row, const int* entry) {
      ptx::tma_load_4d(to + box * rows * chunk_dim, args.maps[map_K], full, chunk * chunk_dim, row, kv_head,
                       holds_keys ? pages[box] : place.look_up(box, entry));
    });
  }

  /// load(row, page) for each stage of V of a block, in order.
  template <typename Load>
  __device__ __forceinline__ static void for_value_stages(const AttentionArgs& args, const Place& block, const Load& load) {
    for_boxes<holds_values>(args, block, [&](int box, int row, const int* entry) {
      const int page = holds_values ? block.pages[box] : block.look_up(box, entry);
#pragma unroll 1
      for (int begin = 0; begin < rows; begin += S::value_rows) load(row + begin, page);
    });
  }

 private:
  __device__ __forceinline__ void find_pages(const AttentionArgs& args) {
    if constexpr (holds_keys) {
      for_boxes<true>(args, place, [&](int box, int, const int* entry) { pages[box] = place.look_up(box, entry); });
    }
    if constexpr (holds_values) {
#pragma unroll
      for (int box = 0; box < boxes; ++box) place.pages[box] = pages[box];
    }
  }

  template <bool unrolled, typename Visit>
  __device__ __forceinline__ static void for_boxes(const AttentionArgs& args, const Place& block, const Visit& visit) {
    int row = block.row;
    const int* entry = block.entry;
#pragma unroll(unrolled ? boxes : 1)
    for (int box = 0; box < boxes; ++box) {
      visit(box, row, entry);
      row += rows;
      const bool next = row >= args.page_size;
      entry += next ? 1 : 0;
      row = next ? 0 : row;
    }
  }
};

/// Blocks that are not in pages: nothing to keep.
template <ForwardConfig config>
requires(!(config.features.paged && Shape<config>::wide)) struct WidePages<config> {
  struct Place {};
};

}  // namespace flash_attention::forward_sm90
