#pragma once

// The range of keys that a row sees moves on with its query (causal, window), or ends with its document. If it begins
// or ends in a tile, some vectors of lanes see none of some keys. The products leave these out: some vectors for each
// few keys, or some keys for each vector. At length 128 that is a third of all products of a causal call.

#include "cpu/tile/multiply.h"
#include "cpu/tile/tile.h"

namespace flash_attention::cpu {
namespace {

/// Keys that the products take at a time.
FLASH_ATTENTION_INLINE int diagonal_step(const Tile& tile) { return tile.has_diagonal ? vector_lanes : tile.count; }

/// The vectors that see some of the keys [key, key + count) of a tile, and all vectors between them.
struct VectorsOfKeys {
  int first = 0, last;

  VectorsOfKeys(const RowBlock& block, const Tile& tile, int key, int count) : last(block.vectors) {
    if (!tile.has_diagonal) return;
    const auto sees = [&](int v) { return tile.seen_by[v].first < key + count && tile.seen_by[v].last > key; };
    while (last > first && !sees(last - 1)) --last;
    while (first < last && !sees(first)) ++first;
  }
  int count() const { return last - first; }
};

/// Whether the vectors of a block see so few of a tile's keys that it is better to process each with its own keys.
inline bool apart_by_vectors(const RowBlock& block, const Tile& tile) {
  if (!tile.has_diagonal) return false;
  int seen = 0;
  for (int v = 0; v < block.vectors; ++v) seen += tile.seen_by[v].count();
  return 6 * seen < 5 * block.vectors * tile.count;
}

/// C[key][lane] = sum over the columns of rows[key][column] * Bt[column][lane], for the keys [key, key + count) of a
/// tile. Scores that are left out are 0, and are hidden later. Start::add: added to C.
template <Start start = Start::zero>
inline void multiply_keys(const RowBlock& block, const Tile& tile, int key, int count, FloatRows rows, const float* Bt,
                          int columns, float* C) {
  const VectorsOfKeys vectors(block, tile, key, count);
  const int lane = vectors.first * vector_lanes;
  C += key * block.lanes();
  if (start == Start::zero && vectors.count() < block.vectors) {
    for (int i = 0; i < count * block.lanes(); i += vector_lanes) store(C + i, Vec{});
  }
  multiply<start, Order::row_major>({.A = rows.data + key * rows.stride,
                                     .a_stride = rows.stride,
                                     .B = Bt + lane,
                                     .b_stride = block.lanes(),
                                     .C = C + lane,
                                     .c_stride = block.lanes(),
                                     .rows = count,
                                     .depth = columns,
                                     .vectors = vectors.count()});
}

}  // namespace
}  // namespace flash_attention::cpu
