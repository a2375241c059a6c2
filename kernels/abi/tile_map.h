#pragma once

// The map of tiles: which tiles of 64 queries and 64 keys the masks show, on a GPU. mask/tile_map.cuh makes it before a
// kernel begins, tile/tile_map.cuh reads it. It has two bits a tile, and a pair of words for 32 tiles of keys. Every
// kernel and pass has the same tiles. It is the region SharedRegion::masks of the workspace.

#include "abi/config.h"
#include "abi/key_bounds.h"

namespace flash_attention::abi {

/// Bit u belongs to tile number u of the keys. Tiles that do not exist are 0 in both words.
struct TileWords {
  unsigned seen;  // some pair is visible
  unsigned full;  // all pairs are visible
};

/// Words of a row of tiles.
constexpr int map_words(long long seq_kv) { return static_cast<int>((seq_kv + 32 * mask_unit - 1) / (32 * mask_unit)); }

/// Words of a list's bits, of which each is for `keys` keys.
constexpr int list_words(long long seq_kv, int keys) { return static_cast<int>((seq_kv + 32ll * keys - 1) / (32ll * keys)); }

/// How words are made from the bytes of a boolean mask, if the launch of the map makes words.
enum class MapBytes : int {
  none,    // there are none
  beside,  // together with other masks
  alone    // the boolean mask is the only mask
};
constexpr MapBytes map_bytes(const Features& features, bool makes_words) {
  if (!features.mask || !makes_words) return MapBytes::none;
  return features.has_mask_data() ? MapBytes::beside : MapBytes::alone;
}

/// The most rows of tiles that a block of mask/tile_map.cuh takes: those of one byte of a column. If it makes words of
/// masks it takes fewer, so that all SMs have work; for a boolean mask those of one tile of the kernel, or one.
constexpr int max_map_rows = 8;
constexpr int mask_map_rows(bool makes_words, MapBytes bytes, int block_q, long long seq_q, long long seq_kv) {
  if (bytes != MapBytes::none) return bytes == MapBytes::alone ? 1 : block_q / mask_unit;
  const long long tiles = (seq_q + mask_unit - 1) / mask_unit * map_words(seq_kv);
  return !makes_words || tiles >= 256 * 8 ? max_map_rows : tiles >= 256 * 4 ? 4 : 2;
}

// If a mask program is the only mask, and words are made (mask/program_rows.cuh): a block takes a row tile of the
// kernel and this many words of the map. If there are few row tiles, several blocks share the blocks of keys that are
// tested.
constexpr bool map_by_program(const Features& features, bool makes_words) {
  return makes_words && features.mask_program && !features.mask && !features.block_mask && features.hidden_bounds == 0;
}
constexpr int program_map_words = 8, program_row_bytes = 64;
constexpr int program_map_blocks(int block_q, long long seq_q, long long seq_kv) {
  const long long rows = (seq_q + block_q - 1) / block_q;
  return static_cast<int>(rows * ((map_words(seq_kv) + program_map_words - 1) / program_map_words));
}
constexpr int program_map_parts(int blocks) { return blocks >= 192 ? 1 : blocks >= 96 ? 2 : 4; }

/// The ranges of a mask program's tensors in a tile of keys are found once for the rows of a block, for this many
/// reads.
constexpr int max_seen_keys = 8, seen_keys_bytes = 16 * max_seen_keys;
constexpr int program_map_bytes = 128 * program_row_bytes + 32 * program_map_words * (seen_keys_bytes + 4);

/// The number of blocks that share the rows of tiles. Columns have whole words.
constexpr int mask_map_row_blocks(bool makes_words, int rows, long long seq_q) {
  if (!makes_words) return 32 / rows * map_words(seq_q);
  return static_cast<int>((seq_q + rows * mask_unit - 1) / (rows * mask_unit));
}

/// The number of rows of tiles of one head's map, and the row where a sequence begins. batches: 1 if all entries share
/// a map.
constexpr long long map_rows(bool packed, long long batches, long long seq_q, long long total_q) {
  return packed ? total_q / mask_unit + batches : batches * ((seq_q + mask_unit - 1) / mask_unit);
}
constexpr long long map_row(bool packed, long long batch_idx, long long batches, long long seq_q, long long start_q) {
  if (packed) return start_q / mask_unit + batch_idx;
  return batches == 1 ? 0 : batch_idx * ((seq_q + mask_unit - 1) / mask_unit);
}

/// backward/sm90, mask/mask_bits.cuh: a tile has one word for each thread of a warpgroup; this many blocks share the
/// tiles of a row.
constexpr int mask_bits_threads = 128, mask_bits_blocks = 4;

// The same by columns, for backward: for each tile of keys, a bit for every tile of queries that sees something of it,
// in map_words(seq_q) words. Columns follow the rows in the same form, with queries and keys exchanged.

}  // namespace flash_attention::abi
