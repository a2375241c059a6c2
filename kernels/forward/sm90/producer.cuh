#pragma once

// How the producer warp of forward/sm90 and forward/sm90_fp8 passes tiles to the consumers: it writes the tile's
// description to a ring in shared memory and loads the tile's Q. Q_full signals both.

#include "forward/sm90/bias_tiles.cuh"
#include "forward/sm90/schedule.cuh"
#include "forward/sm90/storage.cuh"
#include "forward/sm90/wide_pages.cuh"
#include "ptx/tma.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

/// The place for the producer's next tile. No warpgroup reads its old content any more: warpgroups are at most three tiles
/// behind, and there are four places.
template <class P>
__device__ __forceinline__ Tile& next_tile(const P& producer) {
  return producer.shared.tiles[producer.num_tiles % tile_stages];
}

template <ForwardConfig config>
__device__ __forceinline__ int batch_coordinate(const Tile& tile) {
  return config.features.packed ? 0 : tile.sequence.batch_idx;
}

/// Publishes a tile: Q_full completes when the description is written and Q has landed. Q is loaded only if the tile sees
/// any key, in boxes of chunk_dim columns.
template <int chunk_dim, class P>
__device__ __forceinline__ void publish_tile(P& producer, const Tile& tile) {
  using S = typename P::S;
  const PipelineState<S::q_stages> q(producer.num_tiles);
  const int row = static_cast<int>(tile.sequence.start_q) + tile.q_begin;
  ++producer.num_tiles;
#pragma unroll 1
  for (int w = 0; w < S::row_groups; ++w) {
    ptx::mbarrier_wait(producer.shared.Q_empty[q.stage][w], q.phase ^ 1);  // the warpgroup has read the stage's previous Q
    if (tile.sees_nothing()) {
      ptx::mbarrier_arrive(producer.shared.Q_full[q.stage][w]);
      continue;
    }
    ptx::mbarrier_arrive_expect_tx(producer.shared.Q_full[q.stage][w], S::q_bytes);
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
      if constexpr (P::config.features.stacked_heads != 0) {
        ptx::tma_load_5d(producer.shared.Q[q.stage][w][c], producer.args.maps[map_Q], producer.shared.Q_full[q.stage][w],
                         c * chunk_dim, 0, tile.head_idx, (row + w * wg_rows) / tile::rows_of_query<P::config.features>, tile.sequence.batch_idx);
        continue;
      }
      ptx::tma_load_4d(producer.shared.Q[q.stage][w][c], producer.args.maps[map_Q], producer.shared.Q_full[q.stage][w],
                       c * chunk_dim, row + w * wg_rows, tile.head_idx, batch_coordinate<P::config>(tile));
    }
  }
}

// Loads K and V from pages with TMA. A box has `page_rows` keys: the largest number that divides both the page and the KV
// block, so a box never crosses the end of a page. The last coordinate of a box is the page, read from the table.

template <ForwardConfig config>
struct PagedBlock {
  using S = Shape<config>;
  static constexpr int rows = config.page_rows, boxes = S::block_kv / rows;
  // K and V have the same pages. If there are registers to hold them, each page is looked up only once.
  static constexpr bool holds_pages = boxes <= (S::load_registers < 40 ? 4 : 8);
  // A box begins where the swizzle does: at a multiple of 8 rows of 128 bytes.
  static_assert(rows % 8 == 0 && S::block_kv % rows == 0);

  const AttentionArgs& args;
  const int* entry;  // entry of the page table for the first box
  int row;           // of its page
  int kv_head;
  int first, end;  // boxes that contain a key which some query of the tile sees
  int pages[holds_pages ? boxes : 1];

  __device__ __forceinline__ PagedBlock(const AttentionArgs& arguments, const Tile& tile, int block)
      : args(arguments), kv_head(tile.head_idx / arguments.group) {
    const tile::Visibility<config.features> sight(args, tile.sequence, tile.head_idx);
    const tile::KeyRange seen = sight.keys_of_any(tile.q_begin, tile.q_begin + config.block_q);
    const int kv_begin = block * S::block_kv, page = kv_begin / args.page_size;
    entry = args.page_table + tile.sequence.batch_idx * args.page_table_stride + page;
    row = kv_begin - page * args.page_size;
    first = (seen.begin - kv_begin) / rows;  // rounded towards 0 if negative
    end = tile::ceil_div(seen.end - kv_begin, rows);
    if constexpr (holds_pages) {
      for_boxes([&](int box, int /*row*/, const int* its_entry) { pages[box] = page_of(box, its_entry); });
    }
  }

  /// All boxes of a block of K or V; `chunks` of 128 bytes of columns, S::block_kv rows each.
  template <int chunks, typename Element>
  __device__ __forceinline__ void load(Element* to, const TensorMap& map, ptx::Mbarrier& full) const {
    constexpr int columns = 128 / sizeof(Element);
    for_boxes([&](int box, int its_row, const int* its_entry) {
      const int page = holds_pages ? pages[box] : page_of(box, its_entry);
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        ptx::tma_load_4d(to + (c * S::block_kv + box * rows) * columns, map, full, c * columns, its_row, kv_head, page);
      }
    });
  }

 private:
  /// The page of a box. If no query sees a key of the box, the table's entry may be anything and is not used; the box gets
  /// a coordinate outside of the tensor, which TMA reads as zeros.
  __device__ __forceinline__ int page_of(int box, const int* its_entry) const {
    return box >= first && box < end ? *its_entry : -1;
  }

  template <typename Visit>
  __device__ __forceinline__ void for_boxes(const Visit& visit) const {
    int its_row = row;
    const int* its_entry = entry;
#pragma unroll(holds_pages ? boxes : 2)
    for (int box = 0; box < boxes; ++box) {
      visit(box, its_row, its_entry);
      its_row += rows;
      const bool next = its_row >= args.page_size;
      its_entry += next ? 1 : 0;
      its_row = next ? 0 : its_row;
    }
  }
};

// The producer warp of forward/sm90. One lane issues every TMA copy, as far ahead as there are free stages.
//
//     for each attempt, for each tile of the scheduler:
//       publish the tile, with its Q                                      publish_tile
//       for each KV block of the tile, or of its list:                   schedule.cuh
//         wait for an empty stage; K, V -> shared, by rows or by pages    PagedBlock

template <ForwardConfig its_config>
struct Producer {
  static constexpr ForwardConfig config = its_config;
  using S = Shape<config>;

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  unsigned num_tiles = 0;          // published so far
  PipelineState<S::stages> kv{0};  // of the next block
  BiasBoxes<config> biases{args, shared};
  int listed = 0;      // the ListedBlock that is loaded
  int last_block = 0;  // wide heads: the block whose V comes next
  // With pages, also its place: as much as is known of the next block.
  [[no_unique_address]] WidePages<config> pages{};
  [[no_unique_address]] typename WidePages<config>::Place last_place{};

  /// Loads all tiles of an attempt. find_next(tile) fills in the next one, or returns false. When a tile is published
  /// depends on the stages of Q. With two, it is published while the previous tile's keys are loaded, so its Q arrives in
  /// time. With one, it is published after the tile's first K, for which a stage may be free sooner than for Q. A tile that
  /// is claimed late is published after the previous tile's last block; claim_next() is called before that block.
  template <typename FindNext, typename ClaimNext>
  __device__ __forceinline__ void load_attempt(Attempt attempt, const FindNext& find_next, const ClaimNext& claim_next) {
    constexpr bool early = S::publishes_early, may_be_between = early && !S::claims_late;
    bool exists = find_next(next_tile(*this));
    if (early && exists) publish_tile<chunk_dim>(*this, next_tile(*this));
#pragma unroll 1
    while (exists) {
      const Tile& tile = early ? shared.tiles[(num_tiles - 1) % tile_stages] : next_tile(*this);
      const bool between = may_be_between && (S::q_stages == 2 || tile.work == Work::attend);
      if (!early && tile.blocks == 0) publish_tile<chunk_dim>(*this, tile);
      int n = 0;
      for_blocks(
          tile,
          [&](int block) {
            if constexpr (S::wide) {
              load_wide_keys(tile, block, n == 0);
            } else {
              load_keys(tile, block, !early && n == 0);
            }
            if (between && n == 1) {
              exists = find_next(next_tile(*this));
              if (exists) publish_tile<chunk_dim>(*this, next_tile(*this));
            }
            ++n;
          },
          claim_next);
      if constexpr (S::wide) {
        if (n > 0) load_wide_values(tile);
      }
      if (between && n > 1) continue;
      exists = find_next(next_tile(*this));
      if (early && exists) publish_tile<chunk_dim>(*this, next_tile(*this));
    }
    next_tile(*this) = {.attempt = attempt};  // no tile is left
    publish_tile<chunk_dim>(*this, next_tile(*this));
    await_marks();
  }

  /// The same for all attempts, if another warp finds tiles and blocks (find_tiles).
  __device__ __forceinline__ void load_found() {
    PipelineState<FinderStorage<true>::places> place(0);
#pragma unroll 1
    for (;;) {
      ptx::mbarrier_wait(shared.finder.tile_found, static_cast<int>(num_tiles & 1));  // the next tile is known
      const Tile& tile = next_tile(*this);
      bool published = S::q_stages == 2 || tile.sees_nothing();
      if (published) publish_tile<chunk_dim>(*this, tile);
      if (tile.work == Work::none) {
        await_marks();
        const bool is_over = shared.last_attempt <= static_cast<int>(tile.attempt);
        ptx::mbarrier_arrive(shared.finder.tile_taken);
        if (is_over) return;
        continue;
      }
      if (published) ptx::mbarrier_arrive(shared.finder.tile_taken);
      if (tile.sees_nothing()) continue;
      do {
        ptx::mbarrier_wait(shared.finder.full[place.stage], place.phase);  // the next block is known
        listed = shared.finder.blocks[place.stage];
        ptx::mbarrier_arrive(shared.finder.empty[place.stage]);
        place.advance();
        load_keys(tile, ListedBlock::of(listed).block(), !published);
        if (!published) ptx::mbarrier_arrive(shared.finder.tile_taken);
        published = true;
      } while (!ListedBlock::of(listed).is_last());
    }
  }

 private:
  /// After the last tile of an attempt: waits until the warpgroups have finished and marked all tiles.
  __device__ __forceinline__ void await_marks() const {
    const PipelineState<S::q_stages> q(num_tiles - 1);
#pragma unroll 1
    for (int w = 0; w < S::row_groups; ++w) ptx::mbarrier_wait(shared.Q_empty[q.stage][w], q.phase);
  }

  /// Calls load(block) for each block of a tile, and before_last() before the last one.
  template <typename Load, typename BeforeLast>
  __device__ __forceinline__ void for_blocks(const Tile& tile, const Load& load, const BeforeLast& before_last) {
    if constexpr (S::listed) {
      for_listed<config>(args, tile, [&](ListedBlock described) {
        if (described.is_last()) before_last();
        listed = described.word;
        load(described.block());
      });
    } else {
      const int blocks = tile.blocks;
#pragma unroll 1
      for (int n = 0; n < blocks; ++n) {
        if (S::claims_late && n == blocks - 1) before_last();
        load(block_at<config>(tile, n));
      }
    }
  }

  /// Loads a block of K and V.
  __device__ __forceinline__ void load_keys(const Tile& tile, int block, bool publish_between) {
    if constexpr (config.features.paged) {
      const PagedBlock<config> pages(args, tile, block);
      load_keys([&] { pages.template load<S::chunks>(shared.K[kv.stage][0], args.maps[map_K], shared.K_full[kv.stage]); },
                [&] { pages.template load<S::chunks_v>(shared.V[kv.stage][0], args.maps[map_V], shared.V_full[kv.stage]); },
                tile, block, publish_between);
      return;
    }
    const int batch_idx = batch_coordinate<config>(tile);
    const int kv_head = S::listed ? tile.list.kv_head : tile.head_idx / args.group;
    const int row = static_cast<int>(tile.sequence.start_kv) + block * S::block_kv;
    load_keys(
        [&] {
#pragma unroll
          for (int c = 0; c < S::chunks; ++c) {
            ptx::tma_load_4d(shared.K[kv.stage][c], args.maps[map_K], shared.K_full[kv.stage], c * chunk_dim, row, kv_head,
                             batch_idx);
          }
        },
        [&] {
#pragma unroll
          for (int c = 0; c < S::chunks_v; ++c) {
            ptx::tma_load_4d(shared.V[kv.stage][c], args.maps[map_V], shared.V_full[kv.stage], c * chunk_dim, row, kv_head,
                             batch_idx);
          }
        },
        tile, block, publish_between);
  }

  /// Waits for the stage, then issues the copies into it.
  template <typename CopyK, typename CopyV>
  __device__ __forceinline__ void load_keys(const CopyK& copy_K, const CopyV& copy_V, const Tile& tile, int block,
                                            bool publish_between) {
    // Every warpgroup has read the stage's previous block. Stages begin empty: phase 1 counts as completed.
    ptx::mbarrier_wait(shared.K_empty[kv.stage], kv.phase ^ 1);
    if constexpr (S::listed) shared.listed[kv.stage] = listed;  // valid when K_full completes
    ptx::mbarrier_arrive_expect_tx(shared.K_full[kv.stage], S::k_bytes);
    copy_K();
    if (publish_between) publish_tile<chunk_dim>(*this, tile);
    biases.load(tile, block);
    ptx::mbarrier_wait(shared.V_empty[kv.stage], kv.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.V_full[kv.stage], S::v_bytes);
    copy_V();
    kv.advance();
  }

  /// The place of a KV block, held in registers: reading these numbers from the tile for every box would cost more than the
  /// copies.
  struct WideSource {
    int row, kv_head, batch_idx;

    __device__ __forceinline__ WideSource(const AttentionArgs& args, const Tile& tile, int block)
        : row(static_cast<int>(tile.sequence.start_kv) + block * S::block_kv),
          kv_head(tile.head_idx / args.group),
          batch_idx(batch_coordinate<config>(tile)) {}
  };

  /// Loads a block of K, then V of the previous block: the order in which the consumers use them.
  __device__ __forceinline__ void load_wide_keys(const Tile& tile, int block, bool is_first) {
    const WideSource source(args, tile, block);
    if constexpr (config.features.paged) {
      if (is_first) pages.begin(args, tile, block);
    }
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) {
      ptx::mbarrier_wait(shared.KV_empty[kv.stage], kv.phase ^ 1);  // both warpgroups have read what was there
      if (S::listed && c == 0) shared.listed[kv.stage] = listed;    // valid when the first stage is full
      ptx::mbarrier_arrive_expect_tx(shared.KV_full[kv.stage], forward_sm90_wide_stage_bytes);
      if constexpr (config.features.paged) {
        pages.load_keys(args, shared.KV[kv.stage], shared.KV_full[kv.stage], c);
      } else if constexpr (S::cluster > 1) {
        const int half = static_cast<int>(ptx::cluster_rank()) * S::score_keys;  // of the keys, for both blocks
        ptx::tma_multicast_4d(shared.KV[kv.stage] + half * chunk_dim, args.maps[map_K], shared.KV_full[kv.stage],
                              both_blocks, c * chunk_dim, source.row + half, source.kv_head, source.batch_idx);
      } else {
        ptx::tma_load_4d(shared.KV[kv.stage], args.maps[map_K], shared.KV_full[kv.stage], c * chunk_dim, source.row,
                         source.kv_head, source.batch_idx);
      }
      kv.advance();
      if (is_first && c == tile::min(S::chunks, S::stages) - 1)
        publish_tile<chunk_dim>(*this, tile);  // it may wait for Q; all free stages are filled by now
    }
    if constexpr (config.features.paged) {
      const auto here = pages.advance(args);  // the entries of the next block come while V is loaded
      if (!is_first) load_wide_values(tile);
      last_place = here;
    } else {
      if (!is_first) load_wide_values(tile);
      last_block = block;
    }
  }

  /// V of last_block. Columns past the head dimension read as zero: the warpgroups have as many.
  __device__ __forceinline__ void load_wide_values(const Tile& tile) {
    if constexpr (config.features.paged) {
      pages.for_value_stages(args, last_place, [&](int row, int page) {
        begin_value_stage();
        load_values(row, pages.kv_head, page);
        kv.advance();
      });
    } else {
      const WideSource source(args, tile, last_block);
#pragma unroll 1
      for (int begin = 0; begin < S::block_kv; begin += S::value_rows) {
        begin_value_stage();
        load_values(source.row + begin, source.kv_head, source.batch_idx);
        kv.advance();
      }
    }
  }

  __device__ __forceinline__ void begin_value_stage() const {
    ptx::mbarrier_wait(shared.KV_empty[kv.stage], kv.phase ^ 1);  // both warpgroups have read what was there
    ptx::mbarrier_arrive_expect_tx(shared.KV_full[kv.stage], 2 * S::chunks_v * S::value_rows * chunk_dim * 2);
  }

  /// All columns of a stage of V, or half of them for both blocks of a cluster; `place` is a sequence of the batch, or a
  /// page.
  __device__ __forceinline__ void load_values(int row, int kv_head, int place) const {
    constexpr int chunks = 2 * S::chunks_v / S::cluster;
    constexpr bool whole = wide_box_chunks(config.head_dim_v) > 1;
    const int first = S::cluster > 1 ? static_cast<int>(ptx::cluster_rank()) * chunks : 0;
    auto* const to = shared.KV[kv.stage] + first * S::value_rows * chunk_dim;
    auto& full = shared.KV_full[kv.stage];
    const TensorMap& map = args.maps[map_V];
    if constexpr (whole && S::cluster > 1) {
      ptx::tma_multicast_5d(to, map, full, both_blocks, 0, row, first, kv_head, place);
    } else if constexpr (whole) {
      ptx::tma_load_5d(to, map, full, 0, row, 0, kv_head, place);
    } else {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        auto* const chunk = to + c * S::value_rows * chunk_dim;
        const int column = (first + c) * chunk_dim;
        if constexpr (S::cluster > 1) {
          ptx::tma_multicast_4d(chunk, map, full, both_blocks, column, row, kv_head, place);
        } else {
          ptx::tma_load_4d(chunk, map, full, column, row, kv_head, place);
        }
      }
    }
  }
};

}  // namespace flash_attention::forward_sm90
