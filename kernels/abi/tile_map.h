#pragma once

// Which tiles of 64 queries and 64 keys the masks show, on a GPU: made by mask/tile_map.cuh before a kernel begins, read by
// tile/tile_map.cuh. Two bits a tile, 32 tiles of keys to a pair of words. One granularity for every kernel and pass. It is
// the region SharedRegion::masks of the workspace.

#include "abi/config.h"
#include "abi/key_bounds.h"

namespace flash_attention::abi {

/// Bit u: of the tile of keys number u. Tiles that are not there are 0 in both.
struct TileWords {
  unsigned seen;  // some pair is visible
  unsigned full;  // all are
};

/// Words of a row of tiles.
constexpr int map_words(long long seq_kv) { return static_cast<int>((seq_kv + 32 * mask_unit - 1) / (32 * mask_unit)); }

/// How words come from the bytes of a boolean mask, where the launch of the map makes words.
enum class MapBytes : int {
  none,    // they do not
  beside,  // with other masks
  alone    // the boolean mask is by itself
};
constexpr MapBytes map_bytes(const Features& features, bool makes_words) {
  if (!features.mask || !makes_words) return MapBytes::none;
  return features.has_mask_data() ? MapBytes::beside : MapBytes::alone;
}

/// Rows of tiles that a block of mask/tile_map.cuh takes: those of a byte of a column. Where it makes words of masks fewer,
/// if all SMs would not have one else; of a boolean mask those of a tile of the kernel, or one.
constexpr int max_map_rows = 8;
constexpr int mask_map_rows(bool makes_words, MapBytes bytes, int block_q, long long seq_q, long long seq_kv) {
  if (bytes != MapBytes::none) return bytes == MapBytes::alone ? 1 : block_q / mask_unit;
  const long long tiles = (seq_q + mask_unit - 1) / mask_unit * map_words(seq_kv);
  return !makes_words || tiles >= 256 * 8 ? max_map_rows : tiles >= 256 * 4 ? 4 : 2;
}

// A mask program that is by itself, where words are made (mask/program_rows.cuh): a block takes a row tile of the kernel
// and so many words of the map. Several blocks share the blocks of keys that are tested where there are few row tiles.
constexpr bool map_by_program(const Features& features, bool makes_words) {
  return makes_words && features.mask_program && !features.mask && !features.block_mask && features.hidden_bounds == 0;
}
constexpr int program_map_words = 8, program_row_bytes = 64;
constexpr int program_map_blocks(int block_q, long long seq_q, long long seq_kv) {
  const long long rows = (seq_q + block_q - 1) / block_q;
  return static_cast<int>(rows * ((map_words(seq_kv) + program_map_words - 1) / program_map_words));
}
constexpr int program_map_parts(int blocks) { return blocks >= 192 ? 1 : blocks >= 96 ? 2 : 4; }

/// What a mask program's tensors hold in a tile of keys is found once for the rows of a block: of so many reads.
constexpr int max_seen_keys = 8, seen_keys_bytes = 16 * max_seen_keys;
constexpr int program_map_bytes = 128 * program_row_bytes + 32 * program_map_words * (seen_keys_bytes + 4);

/// Blocks that take the rows of tiles. Columns have whole words.
constexpr int mask_map_row_blocks(bool makes_words, int rows, long long seq_q) {
  if (!makes_words) return 32 / rows * map_words(seq_q);
  return static_cast<int>((seq_q + rows * mask_unit - 1) / (rows * mask_unit));
}

/// Rows of tiles of one head's map, and where those of a sequence begin. batches: 1 where all entries share a map.
constexpr long long map_rows(bool packed, long long batches, long long seq_q, long long total_q) {
  return packed ? total_q / mask_unit + batches : batches * ((seq_q + mask_unit - 1) / mask_unit);
}
constexpr long long map_row(bool packed, long long batch_idx, long long batches, long long seq_q, long long start_q) {
  if (packed) return start_q / mask_unit + batch_idx;
  return batches == 1 ? 0 : batch_idx * ((seq_q + mask_unit - 1) / mask_unit);
}

/// backward/sm90: the words of a tile, of each thread of a warpgroup one, and the blocks that share the tiles of a row
/// (mask/mask_bits.cuh).
constexpr int mask_bits_threads = 128, mask_bits_blocks = 4;

// By columns, for backward: of each tile of keys a bit for every tile of queries that sees something of it, in
// map_words(seq_q) words. Columns follow the rows in the same form, with queries and keys exchanged.

}  // namespace flash_attention::abi
