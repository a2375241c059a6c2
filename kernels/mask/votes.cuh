#pragma once

// Which pairs of a tile of 64 rows and 64 columns are visible, computed by the lanes of a warp together. Rows are keys
// or queries. The warp has 16 rows of the tile. A thread has in registers the rows `row` and `row + 8`, and two of each
// 8 columns, from `column` on (ptx/wgmma.cuh).
//
// Lengths, windows and (for keys) hidden rows leave a row a range of columns: two shifts. All lanes evaluate the other
// masks together for one row at a time, two columns a lane, and a vote turns the results into words. So the data of a
// column is read once for 16 rows, and the data of a row by one lane for all. For a boolean mask a lane reads 32 bytes
// and makes a word of them, from which the other lanes get their bits by shuffles.

#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/visibility.cuh"

namespace flash_attention::mask {

using namespace abi;

template <Features features, bool of_keys>  // along the rows
struct Votes {
  const tile::Visibility<features>& sight;
  int q_begin, kv_begin;  // of the tile
  int row, column;        // this thread's first row and column, in the tile

  /// For both rows: bit 4 g + e belongs to column 8 g + e, counted from this thread's first.
  __device__ __forceinline__ ptx::Vector<unsigned, 2> visible() const {
    ptx::Vector<unsigned, 2> result = ranges();
    if constexpr (has_masks) apply_masks(result.values);
    return result;
  }

  /// The same, by ranges only.
  __device__ __forceinline__ ptx::Vector<unsigned, 2> ranges() const {
    ptx::Vector<unsigned, 2> result;
#pragma unroll
    for (int r = 0; r < 2; ++r) result[r] = of_keys ? queries_of(kv_begin + row + 8 * r) : keys_of(q_begin + row + 8 * r);
    return result;
  }

 private:
  /// The columns before `which`, counted from this thread's first.
  __device__ __forceinline__ static unsigned before(int which) {
    const int inside = tile::max(0, tile::min(which, mask_unit)), bits = inside / 8 * 4 + tile::min(inside % 8, 2);
    return (bits > 31 ? 0xffffffffu : (1u << bits) - 1) & 0x33333333u;
  }

  /// The keys that a query sees, by lengths and windows only.
  __device__ __forceinline__ unsigned keys_of(int query) const {
    const tile::KeyRange range = sight.keys_of(query);
    const int first = kv_begin + column;
    return before(range.end - first) & ~before(range.begin - first);
  }

  /// The queries that see a key, by lengths, windows and hidden rows only: they are ranges.
  __device__ __forceinline__ unsigned queries_of(int key) const {
    const int first = q_begin + column;
    int begin = 0, end = key < sight.visible_kv ? sight.len_q : 0;
    if constexpr (features.left_padding) end = key >= sight.first_kv ? end : 0;
    if constexpr (features.window_right) begin = tile::max(begin, key - sight.diagonal - sight.window_right);
    if constexpr (features.window_left) end = tile::min(end, key - sight.diagonal + sight.window_left + 1);
    if constexpr (features.chunk) {
      const int chunk = sight.chunk_begin(key) - sight.diagonal;
      begin = tile::max(begin, chunk), end = tile::min(end, chunk + sight.chunk);
    }
    unsigned result = before(end - first) & ~before(begin - first);
    if constexpr (features.hidden_bounds != 0) {
      const int* const hidden = sight.data.rows + tile::min(key, last_key()) * features.hidden_bounds;
      const auto at = [&](int bound) { return tile::max(hidden[bound], 0) - first; };
      if constexpr (features.hidden_bounds == 1) result &= before(at(0));
      if constexpr (features.hidden_bounds > 1) result &= before(at(0)) | ~before(at(1));
      if constexpr (features.hidden_bounds == 4) result &= before(at(2)) | ~before(at(3));
    }
    return result;
  }
  __device__ __forceinline__ int last_key() const { return tile::max(sight.visible_kv - 1, 0); }
  __device__ __forceinline__ int last_query() const { return sight.len_q - 1; }

  static constexpr bool has_masks =
      features.mask || features.block_mask || features.mask_program || (features.hidden_bounds != 0 && !of_keys);

  /// The mask data of a query and of a key.
  struct KnownQuery {
    typename tile::Program<features.mask_program>::Row known;
    int index, block;
  };
  struct KnownKey {
    typename tile::Program<features.mask_program>::Key known;
    int block, hidden[features.hidden_bounds == 0 ? 1 : features.hidden_bounds];
  };
  __device__ __forceinline__ KnownQuery known_query(int query) const {
    KnownQuery result{.index = tile::min(query, last_query())};
    if constexpr (features.mask_program) result.known = sight.data.program.row(result.index);
    if constexpr (features.block_mask) result.block = result.index / sight.data.block_q;
    return result;
  }
  __device__ __forceinline__ KnownKey known_key(int key) const {
    KnownKey result{};
    key = tile::min(key, last_key());
    if constexpr (features.mask_program) result.known = sight.data.program.key(key);
    if constexpr (features.block_mask) result.block = key / sight.data.block_kv;
    if constexpr (!of_keys) {
#pragma unroll
      for (int b = 0; b < features.hidden_bounds; ++b) result.hidden[b] = sight.data.rows[key * features.hidden_bounds + b];
    }
    return result;
  }
  __device__ __forceinline__ bool masks_show(const KnownQuery& query, const KnownKey& key) const {
    bool hidden = false;
    if constexpr (!of_keys && features.hidden_bounds != 0) hidden = hides(key.hidden, features.hidden_bounds, query.index);
    if constexpr (features.block_mask) hidden |= sight.data.blocks[query.block * sight.data.blocks_stride + key.block] == 0;
    if constexpr (features.mask_program) hidden |= !sight.data.program.visible(query.known, key.known);
    return !hidden;
  }

  static constexpr bool has_more_masks =
      features.block_mask || features.mask_program || (!of_keys && features.hidden_bounds != 0);

  /// The same for the boolean mask. A lane reads 32 bytes and makes a word of them; lanes then exchange words.
  __device__ __forceinline__ void apply_bytes(unsigned (&visible)[2]) const {
    const int own = row % 8, lane = 4 * own + column / 2, first_row = row / 16 * 16;
    unsigned found[2] = {};
    if constexpr (of_keys) {  // bits k and 16 + k: do queries 2 lane and 2 lane + 1 see key k
      const auto shown = [&](int e) {
        return shown_keys(tile::min(q_begin + 2 * lane + e, last_query()), kv_begin + first_row);
      };
      const unsigned word = shown(0) | shown(1) << 16;
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const unsigned pair = ptx::shuffle(word, 4 * g + column / 2) >> own;
#pragma unroll
        for (int r = 0; r < 2; ++r) found[r] |= ((pair >> 8 * r & 1) | (pair >> (8 * r + 15) & 2)) << 4 * g;
      }
    } else {  // bit k: does query lane / 2 see key 32 (lane % 2) + k
      const int query = tile::min(q_begin + first_row + lane / 2, last_query()), key = kv_begin + lane % 2 * 32;
      const unsigned word = shown_keys(query, key) | shown_keys(query, key + 16) << 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned pairs = ptx::shuffle(word, 2 * (own + 8 * r) + half) >> column & 0x03030303u;
          pairs = (pairs | pairs >> 4) & 0x00330033u;
          found[r] |= ((pairs | pairs >> 8) & 0x3333u) << 16 * half;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] &= found[r];
  }

  /// Removes from `visible` what the other masks hide from the warp's 16 rows. A lane tests two columns, one row after
  /// another; each lane has the data of one row. A vote makes the words of a row.
  __device__ __forceinline__ void apply_masks(unsigned (&visible)[2]) const {
    if constexpr (features.mask) apply_bytes(visible);
    if constexpr (!has_more_masks) return;
    constexpr int unrolled = features.mask_program ? 2 : 8;  // a program takes long to compile
    const int own = row % 8, lane = 4 * own + column / 2;
    const int first_key = kv_begin + (of_keys ? row / 16 * 16 : 2 * lane);
    const int first_query = q_begin + (of_keys ? 2 * lane : row / 16 * 16);
    const KnownKey keys[2] = {known_key(first_key + (of_keys ? lane % 16 : 0)), known_key(first_key + 1)};
    const KnownQuery queries[2] = {known_query(first_query + (of_keys ? 0 : lane % 16)), known_query(first_query + 1)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned found[2] = {};
#pragma unroll unrolled
      for (int k = 0; k < 8; ++k) {
        KnownKey key = keys[0];
        KnownQuery query = queries[0];
        if constexpr (of_keys) key = tile::known_by(keys[0], 8 * r + k);
        if constexpr (!of_keys) query = tile::known_by(queries[0], 8 * r + k);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool sees = masks_show(of_keys ? queries[e] : query, of_keys ? key : keys[e]);
          const unsigned word = ptx::ballot(sees);  // bit l belongs to column 2 l + e
          found[e] = own == k ? word : found[e];
        }
      }
      constexpr unsigned firsts = 0x11111111u;  // one bit for each group of 8 columns
      visible[r] &= (found[0] >> column / 2 & firsts) | (found[1] >> column / 2 & firsts) << 1;
    }
  }

  /// Which of 16 keys a query sees by the boolean mask. Reads 16 bytes at a time if they are aligned.
  __device__ __forceinline__ unsigned shown_keys(int query, int first_key) const {
    const unsigned char* const bytes = sight.mask + query * sight.mask_stride + first_key;
    unsigned result = 0;
    if (first_key + 15 <= last_key() && reinterpret_cast<unsigned long long>(bytes) % 16 == 0) {
      const auto words = ptx::load_global(reinterpret_cast<const ptx::Vector<unsigned, 4>*>(bytes));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // for each byte
        const unsigned some = (((words[w] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[w]) >> 7 & 0x01010101u;
        result |= some * 0x10204080u >> 28 << 4 * w;
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < 16; ++k) result |= bytes[tile::min(k, last_key() - first_key)] != 0 ? 1u << k : 0u;
    }
    return result;
  }
};

}  // namespace flash_attention::mask
