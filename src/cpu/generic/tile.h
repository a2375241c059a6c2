#pragma once

// A tile of keys before anything is computed: whether some, all or no rows of a block see it. A boolean mask is read once
// for that, a bit a score, and the scores are hidden by these bits later.

#include "cpu/generic/ahead.h"
#include "cpu/generic/lanes.h"

namespace flash_attention::cpu {
namespace {

enum class Seen { none, some, all };

/// What a boolean mask shows of a tile: bit j of keys[w][lane] is key 32 * w + j.
struct MaskBits {
  alignas(64) std::uint32_t keys[block_kv / 32][block_q];

  Seen read(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
    const std::uint8_t* mask =
        reinterpret_cast<const std::uint8_t*>(call.mask.data) + block.batch * call.mask.batch_stride + begin;
    std::uint32_t any = 0, hidden = 0;
    for (int lane = 0; lane < block.rows; ++lane) {
      const std::uint8_t* row = mask + block.head[lane] * call.mask.head_stride + block.query[lane] * call.mask.q_stride;
      __builtin_prefetch(row + block_kv);
      for (int w = 0; 32 * w < count; ++w) {
        const int here = smaller(count - 32 * w, 32);
        const std::uint32_t bits = here == 32 ? nonzero_bytes(row + 32 * w) : some_bytes(row + 32 * w, here);
        keys[w][lane] = bits;
        any |= bits;
        hidden |= ~bits & (0xffffffffu >> (32 - here));
      }
    }
    for (int lane = block.rows; lane < block.lanes(); ++lane) {
      for (int w = 0; 32 * w < count; ++w) keys[w][lane] = keys[w][block.rows - 1];
    }
    return hidden == 0 ? Seen::all : any != 0 ? Seen::some : Seen::none;
  }

 private:
  static std::uint32_t some_bytes(const std::uint8_t* from, int count) {
    std::uint8_t bytes[32] = {};
    for (int i = 0; i < count; ++i) bytes[i] = from[i];
    return nonzero_bytes(bytes);
  }
};

/// The keys [begin, begin + count) for one block.
struct Tile {
  std::int64_t begin;
  int count;
  Seen seen;
  bool weighted;  // every row has a say in every key: nothing is hidden, nothing dropped
  MaskBits mask;  // where there is a mask

  Tile(const Call& call, const RowBlock& block, std::int64_t first, int most = block_kv)
      : begin(first), count(static_cast<int>(smaller<std::int64_t>(most, block.key_end - first))) {
    seen = begin >= block.full_begin && begin + count <= block.full_end ? Seen::all : Seen::some;
    if (call.mask.data != nullptr) {
      const Seen through_mask = mask.read(call, block, begin, count);
      seen = through_mask == Seen::all ? seen : through_mask;
    }
    weighted = seen == Seen::all && !call.dropout;
  }
};

/// visit(b, tile, K, V, next) for the tiles of keys that blocks[b] sees something of; K and V come once for all blocks.
/// next may be asked for meanwhile. whole_values: rows of V can be read in whole vectors.
template <typename Scratch, typename Visit>
FLASH_ATTENTION_INLINE void for_tiles(const Call& call, const BlockList& blocks, bool whole_values, Scratch& scratch,
                                      Visit visit) {
  const bool asks = blocks_per_head(call) <= most_blocks && come_from_memory(call);
  for (std::int64_t begin = blocks.key_begin; begin < blocks.key_end; begin += block_kv) {
    const int count = static_cast<int>(smaller<std::int64_t>(block_kv, blocks.key_end - begin));
    const FloatRows K = key_rows(call, blocks[0], call.k, begin, count, call.head_dim, false, scratch.K);
    const FloatRows V = key_rows(call, blocks[0], call.v, begin, count, call.head_dim_v, whole_values, scratch.V);
    const std::int64_t after = begin + count, end = asks ? smaller(after + block_kv, blocks.key_end) : after;
    NextTile next = next_tile(call, blocks[0], after, end);
    for (int b = 0; b < blocks.count; ++b) {
      const RowBlock& block = blocks[b];
      if (begin >= block.key_end || begin + count <= block.key_begin) continue;
      const Tile tile(call, block, begin, count);
      if (tile.seen != Seen::none) visit(b, tile, K, V, next);
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
