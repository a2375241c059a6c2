#pragma once

// Which tiles of 64 queries and 64 keys the masks show, on a GPU: made by mask/tile_map.cuh before a kernel begins, read by
// tile/tile_map.cuh. Two bits a tile, 32 tiles of keys to a pair of words. One granularity for every kernel and pass. It is
// the region SharedRegion::masks of the workspace.

#include "abi/key_bounds.h"

namespace flash_attention::abi {

/// Bit u: of the tile of keys number u. Tiles that are not there are 0 in both.
struct TileWords {
  unsigned seen;  // some pair is visible
  unsigned full;  // all are
};

/// Rows of tiles that a block of mask/tile_map.cuh takes: a byte of a column, or as many as make words of masks together.
constexpr int mask_map_rows(bool makes_words) { return makes_words ? 2 : 8; }

/// Words of a row of tiles.
constexpr int map_words(long long seq_kv) { return static_cast<int>((seq_kv + 32 * mask_unit - 1) / (32 * mask_unit)); }

/// Rows of tiles of one head's map, and where those of a sequence begin. batches: 1 where all entries share a map.
constexpr long long map_rows(bool packed, long long batches, long long seq_q, long long total_q) {
  return packed ? total_q / mask_unit + batches : batches * ((seq_q + mask_unit - 1) / mask_unit);
}
constexpr long long map_row(bool packed, long long batch_idx, long long batches, long long seq_q, long long start_q) {
  if (packed) return start_q / mask_unit + batch_idx;
  return batches == 1 ? 0 : batch_idx * ((seq_q + mask_unit - 1) / mask_unit);
}

// By columns, for backward: of each tile of keys a bit for every tile of queries that sees something of it, in
// map_words(seq_q) words. Columns follow the rows in the same form, with queries and keys exchanged.

}  // namespace flash_attention::abi
