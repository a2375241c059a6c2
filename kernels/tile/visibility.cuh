#pragma once

#include "tile/bit_mask.cuh"
#include "tile/program.cuh"
#include "tile/sequence.cuh"
#include "tile/tile_map.cuh"

// Which keys a query sees, for all kernels: of a pair (visible), of a row (keys_of), of rows (keys_of_any,
// keys_of_all), of a tile (none_visible, masks_hide, all_visible; otherwise it is partial), and the tiles of a row or a
// column (key_tiles, query_tiles). docs/numerics.md has the formula. The same for the CPU is src/cpu/tile/rows.h.

namespace flash_attention::tile {

/// A range of tiles, the last one excluded.
struct TileRange {
  int begin;
  int end;
};

/// A range of keys, the last one excluded. It is empty if end <= begin.
struct KeyRange {
  int begin;
  int end;
};

/// The keys that the queries of one sequence and head see.
template <Features features>
struct Visibility {
  static constexpr bool hides = features.hides_keys();
  /// Whether some tiles within the range of their rows may be hidden.
  static constexpr bool skips_tiles = features.has_tile_map();

  int len_q;
  int len_kv;
  int visible_kv;
  int first_kv;
  int diagonal;  // the key on the diagonal of query 0
  int window_left;
  int window_right;
  int chunk;
  const unsigned char* mask;
  long long mask_stride;
  MaskData<features> data;  // hidden rows, blocks and a mask program
  TileMap<features> map;    // their map of tiles
  SequenceBits<features> bits;

  __device__ __forceinline__ Visibility(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : len_q(sequence.len_q),
        len_kv(sequence.len_kv),
        visible_kv(sequence.visible_kv),
        first_kv(sequence.first_kv),
        diagonal(features.top_left ? 0 : sequence.len_kv - sequence.len_q / rows_of_query<features>),
        window_left(args.window_left),
        window_right(args.window_right),
        data(args, sequence, head_idx),
        map(args, sequence, head_idx),
        bits(args, sequence) {
    if constexpr (features.sequence_windows) {
      window_left = tighter(window_left, args.sequence_windows[2 * sequence.batch_idx]);
      window_right = tighter(window_right, args.sequence_windows[2 * sequence.batch_idx + 1]);
    }
    if constexpr (features.chunk) chunk = args.chunk;
    if constexpr (features.mask) {
      mask = static_cast<const unsigned char*>(args.mask.data) + sequence.batch_idx * args.mask.batch_stride +
             head_idx * args.mask.head_stride;
      mask_stride = args.mask.q_stride;
    }
  }

  /// The nearer of two bounds. A negative bound means none.
  __device__ __forceinline__ static int tighter(int bound, int other) {
    constexpr int far = 0x3fffffff;  // adding a position does not overflow
    return min(bound < 0 ? far : bound, other < 0 || other > far ? far : other);
  }

  /// The edges of query i's window, the second one excluded. Both grow with i.
  __device__ __forceinline__ int window_begin(int i) const {
    const int position = i / rows_of_query<features> + diagonal, begin = position - window_left;
    return features.chunk ? max(begin, chunk_begin(position)) : begin;
  }
  __device__ __forceinline__ int window_end(int i) const {
    const int position = i / rows_of_query<features> + diagonal, end = position + window_right + 1;
    return features.chunk ? min(end, chunk_begin(position) + chunk) : end;
  }
  __device__ __forceinline__ int chunk_begin(int position) const {
    return abi::chunk_begin(position, features.left_padding ? first_kv : 0, chunk);
  }

  /// The keys that query i may see, before the mask tensor is applied. Keys outside of the sequence are never among
  /// them.
  __device__ __forceinline__ KeyRange keys_of(int i) const {
    KeyRange range{0, i < len_q ? visible_kv : 0};
    if constexpr (features.left_padding) range.begin = first_kv;
    if constexpr (features.window_left) range.begin = max(range.begin, window_begin(i));
    if constexpr (features.window_right) range.end = min(range.end, window_end(i));
    return range;
  }

  /// keys_of_any: the keys that some of the queries [q_begin, q_end) may see. keys_of_all: those that all of them see;
  /// unused queries do not count. Both bounds of a range grow with the query.
  __device__ __forceinline__ KeyRange keys_of_any(int q_begin, int q_end) const {
    if (q_begin >= len_q) return {0, 0};
    return {keys_of(q_begin).begin, keys_of(min(q_end, len_q) - 1).end};
  }
  __device__ __forceinline__ KeyRange keys_of_all(int q_begin, int q_end) const {
    if (features.mask || features.has_mask_data() || features.precomputed_mask_bits || q_begin >= len_q) return {0, 0};
    KeyRange range{keys_of(min(q_end, len_q) - 1).begin, keys_of(q_begin).end};
    if constexpr (features.bit_mask()) range.end = bits.seen_by_all(range.end);
    return range;
  }

  /// Whether query i sees key j of its range.
  __device__ __forceinline__ bool visible(const KeyRange& range, int i, int j) const {
    bool result = visible_but_by_bits(range, i, j);
    if constexpr (features.bit_mask()) result = result && bits.shows(i, j);
    return result;
  }
  /// The same without the bit mask.
  __device__ __forceinline__ bool visible_but_by_bits(const KeyRange& range, int i, int j) const {
    bool result = j < range.end;
    if constexpr (features.window_left || features.left_padding) result = result && j >= range.begin;
    if constexpr (features.mask) result = result && mask[i * mask_stride + j] != 0;
    if constexpr (features.has_mask_data()) result = result && !data.hides_pair(i, j);
    return result;
  }

  /// Whether query i sees key j; false outside of the sequence.
  __device__ __forceinline__ bool visible(int i, int j) const { return visible(keys_of(i), i, j); }

  /// The tiles of block_kv keys of which the queries [q_begin, q_begin + block_q) see something.
  template <int block_q, int block_kv>
  __device__ __forceinline__ TileRange key_tiles(int q_begin) const {
    const int q_last = min(q_begin + block_q, len_q) - 1;
    int begin = features.left_padding ? first_kv : 0;
    int end = q_begin < len_q ? visible_kv : 0;
    if constexpr (features.window_left) begin = max(begin, window_begin(q_begin));
    if constexpr (features.window_right) end = min(end, window_end(q_last));
    if (begin >= end) return {0, 0};
    return {begin / block_kv, ceil_div(end, block_kv)};
  }

  /// The tiles of block_q queries that see something of the keys [kv_begin, kv_begin + block_kv).
  template <int block_q, int block_kv>
  __device__ __forceinline__ TileRange query_tiles(int kv_begin) const {
    const int kv_last = min(kv_begin + block_kv, visible_kv) - 1;
    int begin = 0;
    constexpr int stack = rows_of_query<features>;
    int end = kv_begin < visible_kv ? len_q / stack : 0;
    if constexpr (features.window_right) begin = max(begin, kv_begin - diagonal - window_right);
    if constexpr (features.window_left) end = min(end, kv_last - diagonal + window_left + 1);
    if constexpr (features.chunk) {
      begin = max(begin, chunk_begin(kv_begin) - diagonal);
      end = min(end, chunk_begin(kv_last) + chunk - diagonal);
    }
    if (begin >= end) return {0, 0};
    return {begin * stack / block_q, ceil_div(end * stack, block_q)};
  }

  /// Whether no query of the tile sees a key of the tile, even before the mask tensor is applied.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool none_visible(int q_begin, int kv_begin) const {
    bool result = kv_begin >= visible_kv || q_begin >= len_q;
    if constexpr (features.left_padding) result = result || kv_begin + block_kv <= first_kv;
    if constexpr (features.window_left) result = result || kv_begin + block_kv - 1 < window_begin(q_begin);
    if constexpr (features.window_right) result = result || kv_begin > window_end(q_begin + block_q - 1) - 1;
    return result;
  }

  /// Whether hidden rows, blocks or a mask program hide the whole tile, so that it can be skipped.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool masks_hide(int q_begin, int kv_begin) const {
    return map.template of<block_q, block_kv>(q_begin, kv_begin) == TileClass::none;
  }

  /// Whether every existing query of the tile sees every key of the tile, so that no score needs a mask.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool all_visible(int q_begin, int kv_begin) const {
    return all_visible_but_by_map<block_q, block_kv>(q_begin, kv_begin) &&
           map.template of<block_q, block_kv>(q_begin, kv_begin) == TileClass::full;
  }
  /// The same without the map.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool all_visible_but_by_map(int q_begin, int kv_begin) const {
    if constexpr ((features.mask && !features.mask_map) || features.score_hides) return false;
    const int q_last = min(q_begin + block_q, len_q) - 1;
    bool result = kv_begin + block_kv <= visible_kv;
    if constexpr (features.bit_mask()) result = result && kv_begin + block_kv <= bits.seen_by_all(visible_kv);
    if constexpr (features.left_padding) result = result && kv_begin >= first_kv;
    if constexpr (features.window_left) result = result && kv_begin >= window_begin(q_last);
    if constexpr (features.window_right) result = result && kv_begin + block_kv - 1 <= window_end(q_begin) - 1;
    return result;
  }
};

}  // namespace flash_attention::tile
