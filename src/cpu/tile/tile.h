#pragma once

// A tile of keys before anything is computed: whether some, all or no rows of a block see it.

#include "cpu/tile/lanes.h"
#include "cpu/tile/prefetch.h"
#include "cpu/tile/tile_mask.h"

namespace flash_attention::cpu {
namespace {

/// What a mask program says of the keys [from, to) for one block.
inline ProgramTile program_class(const Call& call, const RowBlock& block, std::int64_t from, std::int64_t to) {
  int h_begin = block.head[0], h_end = block.head[0] + 1;
  for (int lane = 1; lane < block.rows; ++lane) {
    h_begin = smaller(h_begin, block.head[lane]);
    h_end = larger(h_end, block.head[lane] + 1);
  }
  return call.program->classify(call.program->classes, {.b = block.batch,
                                                        .h_begin = h_begin,
                                                        .h_end = h_end,
                                                        .i_begin = block.query[0],
                                                        .i_end = block.query[block.rows - 1] + 1,
                                                        .j_begin = from,
                                                        .j_end = to});
}

/// The keys [begin, begin + count) for one block.
struct Tile {
  std::int64_t begin;
  int count;
  Seen seen;
  bool weighted;               // every row has a say in every key: nothing is hidden, nothing dropped
  bool program_hides = false;  // the program hides some of it
  MaskBits mask;               // what the masks show

  /// around: the program's class of keys that hold these.
  Tile(const Call& call, const RowBlock& block, std::int64_t first, int most = block_kv,
       ProgramTile around = ProgramTile::edge)
      : begin(first), count(static_cast<int>(smaller<std::int64_t>(most, block.key_end - first))) {
    seen = begin >= block.full_begin && begin + count <= block.full_end ? Seen::all : Seen::some;
    const Seen through_masks = mask.read(call, block, begin, count);
    seen = through_masks == Seen::all ? seen : through_masks;
    if (around == ProgramTile::hidden) seen = Seen::none;
    if (call.has_mask_program() && seen != Seen::none && around == ProgramTile::edge) ask_program(call, block);
    weighted = seen == Seen::all && !call.dropout && !call.has_score_program();  // a score of -inf is hidden
  }

  /// Without the keys at its ends that masks hide from all rows: a document seldom begins or ends with a tile.
  Tile trimmed(const Call& call, const RowBlock& block) const {
    constexpr int unit = 16;  // dropout's bits come in groups of 16 keys
    int first = 0, last = count;
    while (last - first > unit && hides(call, block, first, first + unit)) first += unit;
    while (last - first > unit && hides(call, block, (last - 1) / unit * unit, last)) last = (last - 1) / unit * unit;
    return Tile(call, block, begin + first, last - first);
  }

  /// Whether there may be such keys. Invariant calls have the tiles that every block of rows has.
  bool has_edges(const Call& call) const { return !call.invariant && seen == Seen::some && (mask.hides || program_hides); }

 private:
  /// Whether masks hide the keys [from, to) of the tile from all rows.
  bool hides(const Call& call, const RowBlock& block, int from, int to) const {
    if (mask.hides && mask.hides_all(block, from, to)) return true;
    return program_hides && program_class(call, block, begin + from, begin + to) == ProgramTile::hidden;
  }

  void ask_program(const Call& call, const RowBlock& block) {
    const ProgramTile class_of_tile = program_class(call, block, begin, begin + count);
    program_hides = class_of_tile == ProgramTile::edge;
    if (class_of_tile != ProgramTile::open) seen = program_hides ? Seen::some : Seen::none;
  }
};

/// Whether no block sees any of the keys, by what is known of them without a look at each.
inline bool all_hidden(const Call& call, const BlockList& blocks, std::int64_t begin, int count) {
  if (call.hidden_rows == nullptr && call.block_mask.data == nullptr) return false;
  for (int b = 0; b < blocks.count; ++b) {
    if (unit_class(call, blocks[b], begin, count) != Seen::none) return false;
  }
  return true;
}

/// What a mask program says of several tiles at once, for each block: most are hidden or open together.
struct ProgramRun {
  static constexpr std::int64_t keys = 8 * block_kv;
  ProgramTile seen[max_blocks] = {};
  std::int64_t end = 0;
  bool hidden = false;  // from all blocks

  /// Asked for the tiles from `begin` on. Without a program nothing is known.
  void move_to(const Call& call, const BlockList& blocks, std::int64_t begin) {
    if (begin < end) return;
    end = smaller(begin + keys, blocks.key_end);
    hidden = call.has_mask_program();
    for (int b = 0; b < blocks.count; ++b) {
      seen[b] = call.has_mask_program() ? program_class(call, blocks[b], begin, end) : ProgramTile::edge;
      hidden = hidden && seen[b] == ProgramTile::hidden;
    }
  }
};

/// K of a tile as float. Latent keys are for forward alone, whose scratch has room that is not in use yet.
template <typename Scratch>
FLASH_ATTENTION_INLINE FloatRows keys_of_tile(const Call& call, const RowBlock& block, FloatRows V, std::int64_t begin,
                                              int count, Scratch& scratch) {
  if constexpr (requires { scratch.safe; }) {
    if (call.latent) return latent_key_rows(call, block, V, begin, count, scratch.K, scratch.safe);
  }
  return key_rows(call, block, call.k, begin, count, call.head_dim, false, scratch.K);
}

/// visit(b, tile, K, V, next) for the tiles of keys that blocks[b] sees something of; K and V come once for all blocks.
/// next may be prefetched meanwhile. whole_values: rows of V can be read in whole vectors.
template <typename Scratch, typename Visit>
FLASH_ATTENTION_INLINE void for_tiles(const Call& call, const BlockList& blocks, bool whole_values, Scratch& scratch,
                                      Visit visit) {
  const bool asks = blocks_per_head(call) <= plan::cpu_blocks_of_a_head && exceeds_cache(call);
  ProgramRun run;
  for (std::int64_t begin = blocks.key_begin; begin < blocks.key_end; begin += block_kv) {
    const int count = static_cast<int>(smaller<std::int64_t>(block_kv, blocks.key_end - begin));
    run.move_to(call, blocks, begin);
    if (run.hidden || all_hidden(call, blocks, begin, count)) continue;
    const FloatRows V = key_rows(call, blocks[0], call.v, begin, count, call.head_dim_v, whole_values, scratch.V);
    const FloatRows K = keys_of_tile(call, blocks[0], V, begin, count, scratch);
    const std::int64_t after = begin + count, end = asks ? smaller(after + block_kv, blocks.key_end) : after;
    NextTile next = next_tile(call, blocks[0], after, end);
    for (int b = 0; b < blocks.count; ++b) {
      const RowBlock& block = blocks[b];
      if (begin >= block.key_end || begin + count <= block.key_begin) continue;
      const Tile tile(call, block, begin, count, run.seen[b]);
      if (tile.seen == Seen::none) continue;
      if (!tile.has_edges(call)) {
        visit(b, tile, K, V, next);
        continue;
      }
      const Tile part = tile.trimmed(call, block);
      const auto rows_of_part = [&](FloatRows rows) {
        return FloatRows{rows.data + (part.begin - begin) * rows.stride, rows.stride};
      };
      if (part.seen != Seen::none) visit(b, part, rows_of_part(K), rows_of_part(V), next);
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
