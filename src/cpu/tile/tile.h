#pragma once

// A tile of keys before any computation: whether some, all or no rows of a block see it.

#include "cpu/tile/lanes.h"
#include "cpu/tile/prefetch.h"
#include "cpu/tile/tile_mask.h"

namespace flash_attention::cpu {
namespace {

/// The class of the keys [from, to) for one block under a mask program.
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
  bool weighted;                    // every weight counts: nothing is hidden, nothing dropped
  bool has_diagonal = false;        // some vector of lanes does not see all of the keys
  MaskBits mask;                    // what the masks and the program hide
  KeyRange seen_by[block_vectors];  // with a diagonal: the keys that some lane of a vector sees

  /// around: the program's class of a larger range that contains these keys.
  Tile(const Call& call, const RowBlock& block, std::int64_t first, int most = block_kv,
       ProgramTile around = ProgramTile::edge)
      : begin(first), count(static_cast<int>(smaller<std::int64_t>(most, block.key_end - first))) {
    seen = through(class_of_range(block), mask.read(call, block, begin, count));
    if (around == ProgramTile::hidden) seen = Seen::none;
    if (call.has_mask_program() && seen != Seen::none && around == ProgramTile::edge) ask_program(call, block);
    finish(call, block);
  }

  /// Keys that were gathered from a list: their scores tell which are hidden.
  explicit Tile(int keys) : begin(0), count(keys), seen(Seen::some), weighted(false) {}

  /// The tile without the keys at its ends that no row sees: a document rarely begins or ends with a tile.
  Tile trimmed(const Call& call, const RowBlock& block) const {
    constexpr int unit = 16;  // dropout's bits come in groups of 16 keys
    KeyRange any{count, 0};
    for (int v = 0; v < block.vectors; ++v) {
      if (seen_by[v].count() == 0) continue;
      any = {smaller(any.first, seen_by[v].first), larger(any.last, seen_by[v].last)};
    }
    Tile part = *this;
    if (any.count() == 0) {  // the masks together hide all, though each one alone does not
      part.seen = Seen::none;
      return part;
    }
    any = {any.first / unit * unit, smaller(round_up(any.last, unit), count)};
    part.begin += any.first;
    part.count = any.count();
    part.mask.drop(block, any.first, any.last);
    const Seen left = part.mask.what_is_left(block, part.count);
    part.mask.hides = left != Seen::all;
    part.seen = through(part.class_of_range(block), left);
    part.finish(call, block);
    return part;
  }

  /// Whether there may be such keys. Invariant calls have the same tiles for every block of rows.
  bool has_edges(const Call& call) const { return !call.invariant && has_diagonal && mask.hides; }

 private:
  Seen class_of_range(const RowBlock& block) const {
    return begin >= block.full_begin && begin + count <= block.full_end ? Seen::all : Seen::some;
  }

  void ask_program(const Call& call, const RowBlock& block) {
    const ProgramTile asked = program_class(call, block, begin, begin + count);
    if (asked == ProgramTile::hidden) seen = Seen::none;
    if (asked == ProgramTile::edge) seen = through(seen, mask.read_program(call, block, begin, count));
  }

  void finish(const Call& call, const RowBlock& block) {
    weighted = seen == Seen::all && !call.dropout && !call.has_score_program();  // a score of -inf is hidden
    has_diagonal = false;
    if (seen != Seen::some) return;
    const auto in_tile = [&](std::int64_t key) {
      return static_cast<int>(smaller<std::int64_t>(larger<std::int64_t>(key - begin, 0), count));
    };
    for (int v = 0; v < block.vectors; ++v) {
      seen_by[v] = {in_tile(block.vector_begin[v]), in_tile(block.vector_end[v])};
      if (mask.hides) seen_by[v] = mask.seen_by(v, seen_by[v]);
      has_diagonal = has_diagonal || seen_by[v].count() < count;
    }
  }
};

/// Whether all blocks are known to see none of the keys, without a test of each key.
inline bool all_hidden(const Call& call, const BlockList& blocks, std::int64_t begin, int count) {
  if (call.hidden_rows == nullptr && call.block_mask.data == nullptr) return false;
  for (int b = 0; b < blocks.count; ++b) {
    if (unit_class(call, blocks[b], begin, count) != Seen::none) return false;
  }
  return true;
}

/// The class of several tiles together under a mask program, for a block: most are hidden or open together.
struct ProgramRun {
  static constexpr std::int64_t keys = 8 * plan::cpu_block_kv;
  std::int64_t end = 0;
  ProgramTile seen = ProgramTile::edge;

  /// The class of the tiles from `begin` on. Without a program nothing is known.
  ProgramTile at(const Call& call, const RowBlock& block, std::int64_t begin, std::int64_t key_end) {
    if (begin < end || !call.has_mask_program()) return seen;
    end = smaller(begin + keys, key_end);
    return seen = program_class(call, block, begin, end);
  }
};

/// K of a tile as float. Latent keys exist only in forward, whose scratch has free room at this point.
template <typename Scratch>
FLASH_ATTENTION_INLINE FloatRows keys_of_tile(const Call& call, const RowBlock& block, FloatRows V, std::int64_t begin,
                                              int count, Scratch& scratch) {
  if constexpr (requires { scratch.safe; }) {
    if (call.latent) return latent_key_rows(call, block, V, begin, count, scratch.K, scratch.safe);
  }
  return key_rows(call, block, call.k, begin, count, call.head_dim, false, scratch.K);
}

/// Calls visit(b, tile, K, V, next) for the tiles of keys of which blocks[b] sees something. K and V are loaded once
/// for all blocks. visit may prefetch `next`. whole_values: rows of V can be read in whole vectors.
template <typename Scratch, typename Visit>
FLASH_ATTENTION_INLINE void for_tiles(const Call& call, const BlockList& blocks, bool whole_values, Scratch& scratch,
                                      Visit visit) {
  const bool asks = blocks_per_head(call) <= plan::cpu_blocks_of_a_head && exceeds_cache(call);
  ProgramRun runs[max_blocks];
  for (std::int64_t begin = blocks.key_begin; begin < blocks.key_end; begin += block_kv) {
    const int count = static_cast<int>(smaller<std::int64_t>(block_kv, blocks.key_end - begin));
    bool hidden = true;
    for (int b = 0; b < blocks.count; ++b) {
      hidden = (runs[b].at(call, blocks[b], begin, blocks.key_end) == ProgramTile::hidden) && hidden;
    }
    if (hidden || all_hidden(call, blocks, begin, count)) continue;
    const FloatRows V = key_rows(call, blocks[0], call.v, begin, count, call.head_dim_v, whole_values, scratch.V);
    const FloatRows K = keys_of_tile(call, blocks[0], V, begin, count, scratch);
    const std::int64_t after = begin + count, end = asks ? smaller(after + block_kv, blocks.key_end) : after;
    NextTile next = next_tile(call, blocks[0], after, end);
    for (int b = 0; b < blocks.count; ++b) {
      const RowBlock& block = blocks[b];
      if (begin >= block.key_end || begin + count <= block.key_begin) continue;
      const Tile tile(call, block, begin, count, runs[b].seen);
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
