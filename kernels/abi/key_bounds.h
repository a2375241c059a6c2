#pragma once

// The classes of tiles under masks. A unit is 64 keys in every kernel and pass. Plain constexpr arithmetic, the same on
// host and device.

namespace flash_attention::abi {

constexpr int mask_unit = 64;  // keys

/// Whether the rows of a tile see none, some or all of its keys under one mask.
enum class TileClass : int { none, partial, full };

/// The common bounds of the hidden rows of a unit's keys, for each of the two intervals of a key.
struct KeyBounds {
  int begin_max[2];  // all keys are hidden from the rows [begin_max, end_min)
  int end_min[2];
  int begin_min[2];  // no key is hidden from a row outside of [begin_min, end_max)
  int end_max[2];
};

constexpr int last_row = 0x7fffffff;

/// The bounds of no keys.
constexpr KeyBounds no_bounds() {
  return {{-last_row, -last_row}, {last_row, last_row}, {last_row, last_row}, {-last_row, -last_row}};
}

/// Adds a key's interval [begin, end), which may be empty.
constexpr void take_interval(KeyBounds& bounds, int which, int begin, int end) {
  const bool empty = begin >= end;
  const int low = empty ? last_row : begin, high = empty ? -last_row : end;  // an empty interval hides nothing
  if (low > bounds.begin_max[which]) bounds.begin_max[which] = low;
  if (high < bounds.end_min[which]) bounds.end_min[which] = high;
  if (low < bounds.begin_min[which]) bounds.begin_min[which] = low;
  if (high > bounds.end_max[which]) bounds.end_max[which] = high;
}

/// Adds a key's bounds in the form of Problem::hidden_rows: 1, 2 or 4 numbers.
constexpr void take_key(KeyBounds& bounds, const int* rows, int count) {
  take_interval(bounds, 0, rows[0], count == 1 ? last_row : rows[1]);
  take_interval(bounds, 1, count == 4 ? rows[2] : 0, count == 4 ? rows[3] : 0);
}

/// The class of the rows [first, last] and the keys of a unit.
constexpr TileClass class_of(const KeyBounds& bounds, int first, int last) {
  bool full = true;
  for (int which = 0; which < 2; ++which) {
    if (bounds.begin_max[which] <= first && bounds.end_min[which] > last) return TileClass::none;
    full = full && (bounds.begin_min[which] > last || bounds.end_max[which] <= first);
  }
  return full ? TileClass::full : TileClass::partial;
}

/// The first position of the chunk that contains a position. Chunks are counted from `first`, the first key. All
/// positions before it form one chunk, which has no keys.
template <class Int>
constexpr Int chunk_begin(Int position, Int first, Int chunk) {
  return position < first ? first - chunk : first + (position - first) / chunk * chunk;
}

/// Whether a key is hidden from a row.
constexpr bool hides(const int* rows, int count, int row) {
  // All numbers are read, whatever the first ones are: on a GPU a branch for each pair costs more than they do.
  bool result = row >= rows[0];
  if (count > 1) result &= row < rows[1];
  if (count == 4) result |= static_cast<int>(row >= rows[2]) & static_cast<int>(row < rows[3]);
  return result;
}

/// The number of places for the units of one key head, over all sequences; and the place where those of a sequence
/// begin (`start`: its first key in a packed tensor).
constexpr long long unit_places(bool packed, long long batch, long long seq_kv, long long total_kv) {
  return packed ? total_kv / mask_unit + batch : batch * ((seq_kv + mask_unit - 1) / mask_unit);
}
constexpr long long unit_place(bool packed, long long batch_idx, long long seq_kv, long long start) {
  return packed ? start / mask_unit + batch_idx : batch_idx * ((seq_kv + mask_unit - 1) / mask_unit);
}

}  // namespace flash_attention::abi
