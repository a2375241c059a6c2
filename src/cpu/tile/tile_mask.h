#pragma once

// The masks' class of a tile of keys: nothing, all of it, or a bit for each score, by which scores are hidden later.
// Hidden rows are classified in units of 64 keys, blocks by blocks; a boolean mask and bits are read once.

#include "cpu/tile/lanes.h"
#include "plan/key_bounds.h"

namespace flash_attention::cpu {
namespace {

enum class Seen { none, some, all };

/// The class of two parts of a tile.
FLASH_ATTENTION_INLINE Seen both(Seen x, Seen y) { return x == y ? x : Seen::some; }

/// The class under two masks.
FLASH_ATTENTION_INLINE Seen through(Seen x, Seen y) {
  if (x == Seen::none || y == Seen::none) return Seen::none;
  return x == Seen::all ? y : x;
}

/// The class of the rows of a block and the units of the keys [begin, begin + count) under hidden rows.
inline Seen hidden_rows_class(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
  const bool packed = call.cu_seqlens_kv != nullptr;
  const std::int64_t head = call.hidden_head_stride != 0 ? block.kv_head : 0;
  const auto* units = region<const abi::KeyBounds>(call, plan::CpuRegion::masks) +
                      head * abi::unit_places(packed, call.batch, call.seq_kv, call.total_kv) +
                      abi::unit_place(packed, block.batch, call.seq_kv, block.sequence.kv_begin);
  const std::int64_t first = begin / abi::mask_unit, last = (begin + count - 1) / abi::mask_unit;
  const auto seen = [&](std::int64_t unit) {
    const abi::TileClass found = abi::class_of(units[unit], block.query[0], block.query[block.rows - 1]);
    return found == abi::TileClass::none ? Seen::none : found == abi::TileClass::full ? Seen::all : Seen::some;
  };
  Seen result = seen(first);
  for (std::int64_t unit = first + 1; unit <= last && result != Seen::some; ++unit) result = both(result, seen(unit));
  return result;
}

/// The row of a block mask for a lane.
FLASH_ATTENTION_INLINE const char* mask_blocks(const Call& call, const RowBlock& block, int lane) {
  const ScoreView& mask = call.block_mask;
  return mask.data + block.batch * mask.batch_stride + block.head[lane] * mask.head_stride +
         block.query[lane] / call.mask_block_q * mask.q_stride;
}

/// The class of one row of blocks under a block mask.
inline Seen blocks_class(const Call& call, const char* row, std::int64_t begin, int count) {
  const std::int64_t first = begin / call.mask_block_kv, last = (begin + count - 1) / call.mask_block_kv;
  Seen result = row[first] != 0 ? Seen::all : Seen::none;
  for (std::int64_t at = first + 1; at <= last && result != Seen::some; ++at) {
    result = both(result, row[at] != 0 ? Seen::all : Seen::none);
  }
  return result;
}

inline Seen block_mask_class(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
  const char* row = mask_blocks(call, block, 0);
  Seen result = blocks_class(call, row, begin, count);
  for (int lane = 1; lane < block.rows && result != Seen::some; ++lane) {
    const char* other = mask_blocks(call, block, lane);
    if (other != row) result = both(result, blocks_class(call, row = other, begin, count));
  }
  return result;
}

/// The class of the keys, without a test of each key.
inline Seen unit_class(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
  Seen result = Seen::all;
  if (call.hidden_rows != nullptr) result = hidden_rows_class(call, block, begin, count);
  if (call.block_mask.data != nullptr) result = through(result, block_mask_class(call, block, begin, count));
  return result;
}

/// The bits of one sequence in a bit mask.
struct SequenceBits {
  const std::uint8_t* bytes = nullptr;  // null: the sequence has no mask
  std::int64_t end = 0;                 // of its bits
  std::int64_t row_bits = 0;            // from a query to the next
  std::int64_t first = 0;               // the key of a row's first bit; keys before it are seen

  SequenceBits(const Call& call, const RowBlock& block) {
    if (!call.has_bit_mask) return;
    const Sequence& s = block.sequence;
    const std::int64_t row_bytes = call.bit_mask_row_bytes;
    std::int64_t begin = (call.cu_seqlens_q != nullptr ? s.q_begin : block.batch * s.q_rows) * row_bytes;
    std::int64_t count = s.q_rows * row_bytes;
    if (call.bit_mask_offsets != nullptr) {
      begin = call.bit_mask_offsets[block.batch];
      count = call.bit_mask_offsets[block.batch + 1] - begin;
      if (count <= 0) return;
    }
    bytes = call.bit_mask + begin;
    end = 8 * count;
    row_bits = row_bytes > 0 ? 8 * row_bytes : s.kv_used;
    first = row_bytes > 0 ? s.kv_used - s.q_used : 0;
  }

  /// Whether all keys before `key` are visible.
  bool shows_before(std::int64_t key) const { return bytes == nullptr || key <= first; }

  /// The bits of query i for the 32 keys from `key` on.
  std::uint32_t word(std::int64_t i, std::int64_t key) const {
    const std::int64_t column = key - first;
    if (column <= -32) return 0xffffffffu;
    const int before = static_cast<int>(larger<std::int64_t>(-column, 0));
    const std::int64_t begin = i * row_bits + larger<std::int64_t>(column, 0);
    const std::int64_t last = smaller((i + 1) * row_bits, end);  // bits from there on hide
    std::uint64_t bits = 0;
    for (std::int64_t at = begin / 8; at < (begin + 39) / 8 && 8 * at < last; ++at) {
      bits |= std::uint64_t{bytes[at]} << 8 * (at - begin / 8);
    }
    bits >>= begin % 8;
    const std::int64_t there = larger<std::int64_t>(last - begin, 0);
    if (there < 32) bits &= (std::uint64_t{1} << there) - 1;
    return static_cast<std::uint32_t>(bits << before | ((std::uint64_t{1} << before) - 1));
  }
};

/// Keys [first, last) of a tile.
struct KeyRange {
  int first = 0, last = 0;

  int count() const { return larger(last - first, 0); }
  bool operator==(const KeyRange&) const = default;
};

/// Bit j of keys[w][lane] is key 32 * w + j of a tile.
struct MaskBits {
  alignas(64) std::uint32_t keys[block_kv / 32][block_q];
  bool hides = false;  // there are bits, and some may be 0

  Seen read(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
    const bool units = call.hidden_rows != nullptr || call.block_mask.data != nullptr;
    const Seen known = units ? unit_class(call, block, begin, count) : Seen::all;
    const SequenceBits bits(call, block);
    const bool has_bits = !bits.shows_before(begin + count);
    if (known == Seen::none || (known == Seen::all && call.mask.data == nullptr && !has_bits)) return known;
    if (call.mask.data != nullptr) {
      const Seen shown = read_bytes(call, block, begin, count);
      if (shown == Seen::none) return shown;
      hides = shown != Seen::all;
    }
    if (known == Seen::all && !has_bits) return hides ? Seen::some : Seen::all;
    if (!hides) fill(block, count, 0xffffffffu);
    hides = true;
    if (call.hidden_rows != nullptr) clear_hidden_rows(call, block, begin, count);
    if (call.block_mask.data != nullptr) clear_blocks(call, block, begin, count);
    if (has_bits) clear_bits(bits, block, begin, count);
    repeat_last(block, count);
    return what_is_left(block, count);
  }

  /// Hides the keys that the program hides. Returns the class of the rest.
  Seen read_program(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
    if (!hides) fill(block, count, 0xffffffffu);
    call.program->runner.hide(*call.program, block.program_rows(), begin, count, keys[0], block_q);
    const Seen left = what_is_left(block, count);
    hides = left != Seen::all;
    return left;
  }

  Seen what_is_left(const RowBlock& block, int count) const {
    std::uint32_t any = 0, hidden = 0;
    for (int w = 0; 32 * w < count; ++w) {
      const std::uint32_t there = 0xffffffffu >> (32 - smaller(count - 32 * w, 32));
      for (int lane = 0; lane < block.rows; ++lane) any |= keys[w][lane] & there, hidden |= ~keys[w][lane] & there;
    }
    return any == 0 ? Seen::none : hidden == 0 ? Seen::all : Seen::some;
  }

  /// The keys of `range` that some lane of a vector sees, and all keys between them.
  KeyRange seen_by(int v, KeyRange range) const {
    const auto sees = [&](int word) {
      std::uint32_t any = 0;
      for (int lane = v * vector_lanes; lane < (v + 1) * vector_lanes; ++lane) any |= keys[word][lane];
      return any;
    };
    while (range.count() > 0) {
      const std::uint32_t left = sees(range.first / 32) & (0xffffffffu << range.first % 32);
      range.first = left != 0 ? range.first / 32 * 32 + __builtin_ctz(left) : (range.first / 32 + 1) * 32;
      if (left != 0) break;
    }
    while (range.count() > 0) {
      const int key = range.last - 1;
      const std::uint32_t left = sees(key / 32) & (0xffffffffu >> (31 - key % 32));
      range.last = key / 32 * 32 + (left != 0 ? 32 - __builtin_clz(left) : 0);
      if (left != 0) break;
    }
    return range;
  }

  /// Removes the first keys of `count`.
  void drop(const RowBlock& block, int keys_dropped, int count) {
    const int words = keys_dropped / 32, bits = keys_dropped % 32, last = (count - 1) / 32;
    for (int w = 0; w + words <= last; ++w) {
      const bool more = bits != 0 && w + words < last;
      for (int lane = 0; lane < block.lanes(); ++lane) {
        const std::uint32_t above = more ? keys[w + words + 1][lane] << (32 - bits) : 0;
        keys[w][lane] = (keys[w + words][lane] >> bits) | above;
      }
    }
  }

  void hide_all(const RowBlock& block, int count) {
    fill(block, count, 0);
    hides = true;
  }

 private:
  static std::uint32_t some_bytes(const std::uint8_t* from, int count) {
    std::uint8_t bytes[32] = {};
    for (int i = 0; i < count; ++i) bytes[i] = from[i];
    return nonzero_bytes(bytes);
  }

  Seen read_bytes(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
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
    repeat_last(block, count);
    return hidden == 0 ? Seen::all : any != 0 ? Seen::some : Seen::none;
  }

  /// Lanes past the rows repeat the last row.
  void repeat_last(const RowBlock& block, int count) {
    for (int lane = block.rows; lane < block.lanes(); ++lane) {
      for (int w = 0; 32 * w < count; ++w) keys[w][lane] = keys[w][block.rows - 1];
    }
  }

  void fill(const RowBlock& block, int count, std::uint32_t bits) {
    for (int w = 0; 32 * w < count; ++w) {
      for (int lane = 0; lane < block.lanes(); ++lane) keys[w][lane] = bits;
    }
  }

  void clear_hidden_rows(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
    const std::int32_t* rows = call.hidden_rows + block.batch * call.hidden_batch_stride +
                               block.kv_head * call.hidden_head_stride +
                               (block.sequence.kv_begin + begin) * call.hidden_bounds;
    const std::int32_t first = block.query[0], last = block.query[block.rows - 1];
    for (int key = 0; key < count; ++key, rows += call.hidden_bounds) {
      const auto clear = [&](std::int32_t from, std::int32_t to) {
        if (from > last || to <= first || from >= to) return;
        const std::uint32_t bit = ~(1u << key % 32);
        for (int lane = 0; lane < block.rows; ++lane) {
          if (block.query[lane] >= from && block.query[lane] < to) keys[key / 32][lane] &= bit;
        }
      };
      clear(rows[0], call.hidden_bounds == 1 ? abi::last_row : rows[1]);
      if (call.hidden_bounds == 4) clear(rows[2], rows[3]);
    }
  }

  void clear_bits(const SequenceBits& bits, const RowBlock& block, std::int64_t begin, int count) {
    for (int lane = 0; lane < block.rows; ++lane) {
      for (int w = 0; 32 * w < count; ++w) keys[w][lane] &= bits.word(block.query[lane], begin + 32 * w);
    }
  }

  void clear_blocks(const Call& call, const RowBlock& block, std::int64_t begin, int count) {
    for (int lane = 0; lane < block.rows; ++lane) {
      const char* row = mask_blocks(call, block, lane);
      for (int key = 0; key < count; ++key) {
        if (row[(begin + key) / call.mask_block_kv] == 0) keys[key / 32][lane] &= ~(1u << key % 32);
      }
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
