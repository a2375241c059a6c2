#pragma once

// The range of keys that a row sees moves on with its query (causal, window). Where it begins or ends in a tile, some
// vectors of lanes see none of some keys: the products leave them out, by vectors for some keys, or by keys for a vector.
// At length 128 that is a third of all products of a causal call.

#include "cpu/tile/multiply.h"
#include "cpu/tile/tile.h"

namespace flash_attention::cpu {
namespace {

FLASH_ATTENTION_INLINE bool has_diagonal(const RowBlock& block, const Tile& tile) {
  return tile.begin < block.full_begin || tile.begin + tile.count > block.full_end;
}

/// Keys that the products take at a time.
FLASH_ATTENTION_INLINE int diagonal_step(const RowBlock& block, const Tile& tile) {
  return has_diagonal(block, tile) ? vector_lanes : tile.count;
}

/// The vectors that see some of the keys [key, key + count) of a tile, and those between them.
struct VectorsOfKeys {
  int first = 0, last;

  VectorsOfKeys(const RowBlock& block, const Tile& tile, int key, int count) : last(block.vectors) {
    if (!has_diagonal(block, tile)) return;
    const std::int64_t from = tile.begin + key, to = from + count;
    const auto sees = [&](int v) { return block.vector_begin[v] < to && block.vector_end[v] > from; };
    while (last > first && !sees(last - 1)) --last;
    while (first < last && !sees(first)) ++first;
  }
  int count() const { return last - first; }
};

/// The keys of a tile that some lane of a vector sees.
struct KeysOfVector {
  int first, count;

  KeysOfVector(const RowBlock& block, const Tile& tile, int v) {
    const auto in_tile = [&](std::int64_t key) {
      return static_cast<int>(smaller<std::int64_t>(larger<std::int64_t>(key - tile.begin, 0), tile.count));
    };
    first = in_tile(block.vector_begin[v]);
    count = larger(in_tile(block.vector_end[v]) - first, 0);
  }
};

/// Whether the vectors of a block see so few of a tile's keys that each is better off with its own.
inline bool apart_by_vectors(const RowBlock& block, const Tile& tile) {
  if (!has_diagonal(block, tile)) return false;
  int seen = 0;
  for (int v = 0; v < block.vectors; ++v) seen += KeysOfVector(block, tile, v).count;
  return 6 * seen < 5 * block.vectors * tile.count;
}

/// C[key][lane] = sum over the columns of rows[key][column] * Bt[column][lane], for the keys [key, key + count) of a tile.
/// It is 0 where it was left out: such scores are hidden later.
inline void multiply_keys(const RowBlock& block, const Tile& tile, int key, int count, FloatRows rows, const float* Bt,
                          int columns, float* C) {
  const VectorsOfKeys vectors(block, tile, key, count);
  const int lane = vectors.first * vector_lanes;
  C += key * block.lanes();
  if (vectors.count() < block.vectors) {
    for (int i = 0; i < count * block.lanes(); i += vector_lanes) store(C + i, Vec{});
  }
  multiply<Start::zero, Order::row_major>({.A = rows.data + key * rows.stride,
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
