#pragma once

// How the decode kernels divide work.
//
//   item:  block_q rows of one key head of one sequence, and the tiles of keys that these rows see. With lists of keys (a
//          list for each query) the rows are those of one query, and a tile is 64 entries of its list
//   run:   the tiles of one thread block. Write the tiles of all items one after another; each block takes an equal run of
//          consecutive tiles. A run may begin or end within an item; then several blocks share the item, and their parts
//          are merged (decode/merge.cuh, decode/cluster_merge.cuh)
//   split: if results must not depend on the batch (config.split_tiles), an item is always cut at the same keys
//
// Variants, chosen by the planner: config.item_blocks (each item has a fixed number of blocks, which form a cluster),
// config.strided_items (each block takes whole items), config.row_grid and config.head_grid (blockIdx.y is a tile of rows,
// or a key head, and only blocks of the same blockIdx.y divide work among them).
//
// Lengths are read on the device, so one launch fits all lengths, also within a CUDA graph.

#include "abi/decode.h"
#include "ptx/bits.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/score.cuh"

namespace flash_attention::decode {

using namespace abi;

/// Query tokens [begin, end).
struct Tokens {
  int begin;
  int end;
};

template <ForwardConfig config>
struct Item {
  static constexpr Features features = config.features;
  // All items have the same tiles of keys: a position in the run is found by divisions, without reading lengths.
  static constexpr bool alike = decode_items_are_alike(features);

  int batch_idx;
  int kv_head_idx;
  int row_tile;
  int first_tile;  // of keys
  int end_tile;
  tile::KeyRange seen;  // keys that some row sees; the others are not loaded
  bool only_rows;       // the key head has no other item in this sequence

  // With fixed splits: the split of a tile, counted from key 0, and its end. The bits of a row depend only on these.
  static constexpr int split_of(int tile) { return config.split_tiles > 0 ? tile / config.split_tiles : 0; }
  __device__ __forceinline__ int split_end(int tile) const {
    return config.split_tiles > 0 ? tile::min(end_tile, (split_of(tile) + 1) * config.split_tiles) : end_tile;
  }
  __device__ __forceinline__ bool begins_split(int tile) const {
    return tile == first_tile || (config.split_tiles > 0 && tile % config.split_tiles == 0);
  }

  /// With lists: tiles of the rows of a query.
  static constexpr int query_tiles = features.key_list ? tile::ceil_div(config.group, config.block_q) : 1;

  /// The rows of a tile are [first_row(row_tile), end_row(row_tile, rows)), if the key head has `rows` rows.
  __device__ __forceinline__ static int first_row(int row_tile) {
    if constexpr (!features.key_list) return row_tile * config.block_q;
    return row_tile / query_tiles * config.group + row_tile % query_tiles * config.block_q;
  }
  __device__ __forceinline__ static int end_row(int row_tile, int rows) {
    const int end = first_row(row_tile) + config.block_q;
    if constexpr (!features.key_list) return tile::min(end, rows);
    return tile::min(tile::min(end, (row_tile / query_tiles + 1) * config.group), rows);
  }
  __device__ __forceinline__ int first_row() const { return first_row(row_tile); }
  __device__ __forceinline__ int end_row(int rows) const { return end_row(row_tile, rows); }

  /// The number of row tiles among which this block has items: all of the sequence, or the one of blockIdx.y.
  __device__ __forceinline__ static int row_tiles_of(const tile::Sequence& sequence) {
    static_assert(!config.one_row_tile || !(features.packed || config.row_grid));
    if constexpr (config.one_row_tile) return 1;
    const int tiles = features.key_list ? sequence.rows_q * query_tiles
                                        : tile::ceil_div(sequence.rows_q * config.group, config.block_q);
    return config.row_grid ? tile::min(1, tile::max(0, tiles - first_row_tile())) : tiles;
  }
  __device__ __forceinline__ static int first_row_tile() { return config.row_grid ? static_cast<int>(blockIdx.y) : 0; }
  /// The same for key heads.
  __device__ __forceinline__ static int heads_of(const AttentionArgs& args) { return config.head_grid ? 1 : args.heads_kv; }
  __device__ __forceinline__ static int first_head() { return config.head_grid ? static_cast<int>(blockIdx.y) : 0; }
  __device__ __forceinline__ static Tokens tokens_of(const tile::Sequence& sequence, int row_tile) {
    return {first_row(row_tile) / config.group,
            tile::ceil_div(end_row(row_tile, sequence.rows_q * config.group), config.group)};
  }

  /// Moves to item `idx` of all, if every key head has `row_tiles` tiles of rows.
  __device__ __forceinline__ void place(int idx, int row_tiles, int heads_kv) {
    const int head_idx = idx / row_tiles;
    batch_idx = head_idx / heads_kv;
    kv_head_idx = head_idx % heads_kv;
    row_tile = first_row_tile() + idx % row_tiles;
  }

  /// Finds the keys that the rows see; returns the number of tiles. Rows that see no key have one tile, of which nothing is
  /// loaded: a block must write their zeros.
  __device__ __forceinline__ int find_tiles(const AttentionArgs& args, const tile::Sequence& sequence) {
    const Tokens tokens = tokens_of(sequence, row_tile);
    if constexpr (features.key_list) {
      seen = {0, features.key_set ? args.list_entries * args.list_block_kv : args.list_entries};
    } else {
      seen = tile::Visibility<features>(args, sequence, 0).keys_of_any(tokens.begin, tokens.end);
    }
    if (seen.begin >= seen.end) seen = {0, 0};
    first_tile = seen.begin / config.block_kv;
    end_tile = tile::max(first_tile + 1, tile::ceil_div(seen.end, config.block_kv));
    only_rows = row_tiles_of(sequence) == 1;
    return end_tile - first_tile;
  }
};

/// Divides `total` tiles among blocks; the first `total % blocks` blocks take one tile more than the others.
struct Shares {
  int each;
  int rest;

  __device__ __forceinline__ Shares(int total, int blocks) : each(total / blocks), rest(total % blocks) {}
  __device__ __forceinline__ int begin_of(int block) const { return block * each + tile::min(block, rest); }
  __device__ __forceinline__ int block_of(int tile) const {
    const int of_larger = rest * (each + 1);
    return tile < of_larger ? tile / (each + 1) : rest + (tile - of_larger) / each;
  }
};

/// A position in the sequence of all tiles.
template <ForwardConfig config>
struct Cursor {
  Item<config> item;
  int tile;  // of keys

  __device__ __forceinline__ void next(const AttentionArgs& args) {
    if (++tile < item.end_tile) return;
    if constexpr (config.strided_items) return next_whole(args);
    const int end_head = Item<config>::first_head() + Item<config>::heads_of(args);
    if (item.only_rows && item.kv_head_idx + 1 < end_head) {  // the next head has the same rows and keys
      ++item.kv_head_idx;
      tile = item.first_tile;
      return;
    }
    tile::Sequence sequence = tile::make_sequence<config.features>(args, item.batch_idx);
    if (++item.row_tile == Item<config>::first_row_tile() + Item<config>::row_tiles_of(sequence)) {
      item.row_tile = Item<config>::first_row_tile();
      ++item.kv_head_idx;
    }
    if constexpr (Item<config>::alike) {
      if (item.kv_head_idx == end_head) item.kv_head_idx = Item<config>::first_head(), ++item.batch_idx;
    } else {
      while (item.kv_head_idx == end_head || Item<config>::row_tiles_of(sequence) == 0) {  // to the next with rows
        item.kv_head_idx = Item<config>::first_head();
        if (++item.batch_idx >= args.batch) return;
        sequence = tile::make_sequence<config.features>(args, item.batch_idx);
      }
      item.find_tiles(args, sequence);
    }
    tile = item.first_tile;
  }

  /// With strided_items: from one whole item to this block's next, gridDim.x items further.
  __device__ __forceinline__ void next_whole(const AttentionArgs& args) {
    static_assert(Item<config>::alike || !config.strided_items);
    const int row_tiles = Item<config>::row_tiles_of(tile::make_sequence<config.features>(args, 0));
    const int idx = (item.batch_idx * args.heads_kv + item.kv_head_idx) * row_tiles + item.row_tile;
    item.place(idx + static_cast<int>(gridDim.x), row_tiles, args.heads_kv);
    tile = item.first_tile;
  }
};

/// The run of this block. Every warp computes it, so no barrier is needed. If items differ, each lane adds up the tiles of
/// some sequences; then the lane whose sequences contain the beginning of the run finds the exact place.
template <ForwardConfig config>
struct Run {
  Cursor<config> start;
  Shares shares;
  int begin;  // first tile, counted from the first of all; with item_blocks or strided_items from the block's own first
  int end;

  /// The run is found in few instructions. With a short context this makes the start of the kernel shorter.
  static constexpr bool is_short = config.item_blocks > 0 && config.key_groups == 1 && config.block_q <= 16;

  __device__ __forceinline__ explicit Run(const AttentionArgs& args) : shares(0, 1) {
    if constexpr (config.item_blocks > 0) {
      share_item(args);
    } else if constexpr (Item<config>::alike) {
      divide(args);
    } else {
      search(args);
    }
  }

  /// The block that begins an item whose first tile is tile `position` of all.
  __device__ __forceinline__ int first_block_of(int position) const {
    if constexpr (config.item_blocks > 0) return static_cast<int>(blockIdx.x) / config.item_blocks * config.item_blocks;
    return shares.block_of(position);
  }
  /// The block that begins the first item of this block's run.
  __device__ __forceinline__ int first_block() const {
    return first_block_of(begin - (start.tile - start.item.first_tile));
  }
  /// The number of blocks that share an item; block `first` begins it.
  __device__ __forceinline__ int blocks_of(const Item<config>& item, int first, int position) const {
    const int tiles = item.end_tile - item.first_tile;
    if constexpr (config.item_blocks > 0) return tile::min(config.item_blocks, tiles);
    return shares.block_of(position + tiles - 1) - first + 1;
  }

 private:
  __device__ __forceinline__ void take(int total) {
    shares = Shares(total, static_cast<int>(gridDim.x));
    begin = shares.begin_of(static_cast<int>(blockIdx.x));
    end = shares.begin_of(static_cast<int>(blockIdx.x) + 1);
  }

  /// With item_blocks: blockIdx.x counts tiles of rows and, within each, the blocks of the item.
  __device__ __forceinline__ void share_item(const AttentionArgs& args) {
    constexpr int blocks = tile::max(1, config.item_blocks);
    static_assert(config.item_blocks == 0 || !(config.features.packed || config.row_grid));
    static_assert(config.item_blocks <= 1 || config.split_tiles == 0);
    const int rank = static_cast<int>(blockIdx.x) % blocks;
    start.item = {};
    start.item.batch_idx = static_cast<int>(blockIdx.z);
    start.item.kv_head_idx = static_cast<int>(blockIdx.y);
    start.item.row_tile = static_cast<int>(blockIdx.x) / blocks;
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, start.item.batch_idx);
    shares = Shares(start.item.find_tiles(args, sequence), blocks);
    const int first = shares.begin_of(rank);
    begin = 0, end = shares.begin_of(rank + 1) - first;
    start.tile = start.item.first_tile + first;
  }

  /// If all items have the same tiles: by divisions.
  __device__ __forceinline__ void divide(const AttentionArgs& args) {
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, 0);
    start.item = {};
    start.item.row_tile = Item<config>::first_row_tile();
    const int tiles = start.item.find_tiles(args, sequence), row_tiles = Item<config>::row_tiles_of(sequence);
    const int items = row_tiles * args.heads_kv * args.batch;
    if constexpr (config.strided_items) {  // whole items, the same number for each block
      begin = 0, end = items / static_cast<int>(gridDim.x) * tiles;
      start.item.place(static_cast<int>(blockIdx.x), row_tiles, args.heads_kv);
      start.tile = start.item.first_tile;
      return;
    }
    take(tiles * items);
    if constexpr (config.split_tiles > 0) {  // a split belongs to the block whose share contains its first tile
      const auto to_split = [&](int position) {
        const int tile = position % tiles;
        return position - tile + tile::min(tiles, tile::round_up(tile, config.split_tiles));
      };
      begin = to_split(begin), end = to_split(end);
    }
    start.item.place(begin / tiles, row_tiles, args.heads_kv);
    start.tile = start.item.first_tile + begin % tiles;
  }

  /// If items differ: prefix sums over the sequences, by the lanes of the warp.
  __device__ __forceinline__ void search(const AttentionArgs& args) {
    constexpr Features features = config.features;
    const int lane = threadIdx.x % 32;
    const int each = tile::ceil_div(args.batch, 32);
    const int first = tile::min(lane * each, args.batch), last = tile::min(first + each, args.batch);
    int own = 0;
    // Lengths in flight. Not unrolled for MLA: code that runs once has to be fetched from memory, too.
    constexpr int together = features.latent ? 1 : 4;
#pragma unroll together
    for (int b = first; b < last; ++b) own += tiles_of(args, b);
    int until = own;  // tiles of this lane's sequences and all before them
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = ptx::shuffle_up(until, step);
      if (lane >= step) until += before;
    }
    take(ptx::shuffle(until, 31));
    if (begin == end) return;
    const auto locate = [&](int position) {
      const int owner = ptx::count_ones(ptx::ballot(until <= position));  // the number of lanes that end before it
      int batch_idx = first, left = position - (until - own);
      if (each > 1 && lane == owner) {
        ptx::path<"decode/sm80 several sequences a lane">();
        for (int tiles; left >= (tiles = tiles_of(args, batch_idx)); ++batch_idx) left -= tiles;
      }
      return find(args, ptx::shuffle(batch_idx, owner), ptx::shuffle(left, owner));
    };
    start = locate(begin);
    if constexpr (config.split_tiles > 0) {  // a split belongs to the block whose share contains its first tile
      begin += to_split(args, start);
      if (end < ptx::shuffle(until, 31)) {
        Cursor<config> stop = locate(end);
        end += to_split(args, stop);
      }
    }
  }

  /// Moves the cursor to the next tile that begins a split; returns by how many tiles.
  __device__ __forceinline__ static int to_split(const AttentionArgs& args, Cursor<config>& cursor) {
    if (cursor.item.begins_split(cursor.tile)) return 0;
    const int next = cursor.item.split_end(cursor.tile), tiles = next - cursor.tile;
    cursor.tile = next - 1;
    cursor.next(args);
    return tiles;
  }

  __device__ __forceinline__ int tiles_of_head(const AttentionArgs& args, const tile::Sequence& sequence) const {
    Item<config> item{};
    int tiles = 0;
    item.row_tile = Item<config>::first_row_tile();
    if constexpr (config.one_row_tile) return item.find_tiles(args, sequence);
    const int end = item.row_tile + Item<config>::row_tiles_of(sequence);
    for (; item.row_tile < end; ++item.row_tile) tiles += item.find_tiles(args, sequence);
    return tiles;
  }
  __device__ __forceinline__ int tiles_of(const AttentionArgs& args, int batch_idx) const {
    return tiles_of_head(args, tile::make_sequence<config.features>(args, batch_idx)) * Item<config>::heads_of(args);
  }

  /// The tile that is `left` tiles after the first tile of a sequence.
  __device__ __forceinline__ Cursor<config> find(const AttentionArgs& args, int batch_idx, int left) const {
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, batch_idx);
    Cursor<config> found{{batch_idx, 0, Item<config>::first_row_tile(), 0, 0, {0, 0}, false}, 0};
    const int of_head = config.one_row_tile ? found.item.find_tiles(args, sequence) : tiles_of_head(args, sequence);
    found.item.kv_head_idx = Item<config>::first_head() + left / of_head;
    left %= of_head;
    if constexpr (!config.one_row_tile) {
      for (int tiles; left >= (tiles = found.item.find_tiles(args, sequence)); ++found.item.row_tile) left -= tiles;
    }
    if (left != 0) ptx::path<"decode/sm80 run from within an item">();
    found.tile = found.item.first_tile + left;
    return found;
  }
};

/// Prefetches Q of an item into L2 when its first tiles are loaded: both are needed at the same time. Called by one warp.
template <ForwardConfig config>
__device__ __forceinline__ void prefetch_Q(const AttentionArgs& args, const Item<config>& item) {
  if constexpr (!config.features.packed) {
    using Element = ptx::Element<config.features.dtype>;
    const int lane = threadIdx.x % 32, packed = item.first_row() + lane, query = packed / config.group;
    if (lane >= config.block_q || query >= args.seq_q) return;
    const auto* row = static_cast<const Element*>(args.Q.data) + item.batch_idx * args.Q.batch_stride +
                      query * args.Q.seq_stride +
                      (item.kv_head_idx * config.group + packed % config.group) * args.Q.head_stride;
    for (int column = 0; column < config.head_dim; column += 64) ptx::prefetch_L2(row + column);
  }
}

}  // namespace flash_attention::decode
