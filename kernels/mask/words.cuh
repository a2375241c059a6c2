#pragma once

// Which pairs of a block of keys the masks show: a bit a pair.

#include "abi/workspace.h"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"
#include "tile/visibility.cuh"
#include "tile/workspace.cuh"

namespace flash_attention::mask {

/// The bits of a row and a block of keys: bit l of word k belongs to key l * (block_kv / 32) + k.
template <int block_kv>
using Words = ptx::Vector<unsigned, block_kv / 32 < 2 ? 1 : block_kv / 32>;

/// Words are made with the map of tiles (WordMaker), for each row tile of block_q queries of each head and sequence
/// that has a separate map. This is the number of such a row tile.
template <int block_q>
__device__ __forceinline__ int row_tile_of_words(const abi::AttentionArgs& args, int batch_idx, int head_idx, int q_begin) {
  const int map_head = head_idx / (args.heads_q / args.map_heads), map_batch = args.map_batches == 1 ? 0 : batch_idx;
  return (map_batch * args.map_heads + map_head) * tile::ceil_div(args.seq_q, block_q) + q_begin / block_q;
}

/// The address of the words of a block of keys: those of the block_q rows one after another.
template <int block_q, int block_kv>
__device__ __forceinline__ Words<block_kv>* precomputed_mask_bits(const abi::AttentionArgs& args, int row_tile, int block) {
  const long long place = static_cast<long long>(row_tile) * tile::ceil_div(args.seq_kv, block_kv) + block;
  return tile::workspace<Words<block_kv>>(args, abi::ForwardSm90Region::mask_words) + place * block_q;
}

// Makes the words of masks, a warp for some rows.

using abi::AttentionArgs, abi::Features;

/// A lane has block_kv / 32 neighbouring keys, and evaluates the masks for one row after another. A vote makes the
/// words of a row. Lane n keeps those of row n.
template <Features features, int block_kv, int rows, int rows_ahead = rows>
struct WordMaker {
  using Words = mask::Words<block_kv>;
  using Program = tile::Program<features.mask_program>;
  static constexpr int keys = block_kv / 32;  // neighbouring keys of a lane
  // Rows whose bytes are loaded together, or that are unrolled. A program takes long to compile, a block mask needs
  // registers, and so do bytes that are loaded one by one.
  static constexpr int together(bool aligned) {
    if (features.mask_program || features.block_mask) return 2;
    if (!features.mask) return rows;
    return aligned ? rows_ahead : 2;
  }

  const AttentionArgs& args;
  const tile::Sequence& sequence;
  const int head_idx;
  const int lane;
  const tile::MaskData<features> data;

  /// The mask data of this lane's keys of a block, and the address of its bytes.
  struct Keys {
    int hidden[keys][features.hidden_bounds == 0 ? 1 : features.hidden_bounds];
    typename Program::Key known[keys];
    int column[keys];  // of the block mask
    const unsigned char* bytes;
    int last;      // the last key that may be read, counted from the lane's first
    bool aligned;  // bytes may be read together
  };
  /// The same of a row.
  struct Row {
    typename Program::Row known;
    int block;  // of the block mask
  };

  __device__ __forceinline__ Row row_at(int i) const {
    Row result;
    i = tile::min(i, sequence.len_q - 1);
    if constexpr (features.mask_program) result.known = data.program.row(i);
    if constexpr (features.block_mask) result.block = i / data.block_q;
    return result;
  }

  __device__ __forceinline__ Keys keys_at(int kv_begin) const {
    const int first = kv_begin + lane * keys, last = sequence.visible_kv - 1;
    Keys result;
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      const int j = tile::min(first + k, last);
      if constexpr (features.mask_program) result.known[k] = data.program.key(j);
      if constexpr (features.block_mask) result.column[k] = j / data.block_kv;
#pragma unroll
      for (int b = 0; b < features.hidden_bounds; ++b) result.hidden[k][b] = data.rows[j * features.hidden_bounds + b];
    }
    if constexpr (features.mask) {
      const auto* const mask = static_cast<const unsigned char*>(args.mask.data);
      result.bytes = mask + sequence.batch_idx * args.mask.batch_stride + head_idx * args.mask.head_stride + first;
      result.last = last - first;
      const auto place = reinterpret_cast<unsigned long long>(result.bytes);
      result.aligned = kv_begin + block_kv <= sequence.visible_kv &&
                       (place | static_cast<unsigned long long>(args.mask.q_stride)) % keys == 0;
    }
    return result;
  }

  /// The words of the rows from `first` on; `own` is row number `lane` of them.
  __device__ __forceinline__ Words words(const Keys& known, const Row& own, int first) const {
    return features.mask && !known.aligned ? words_of<false>(known, own, first) : words_of<true>(known, own, first);
  }

 private:
  /// The bytes of a lane's keys in a row; 0 is hidden.
  template <bool aligned>
  __device__ __forceinline__ unsigned bytes_at(const Keys& known, int i) const {
    const unsigned char* const row = known.bytes + i * args.mask.q_stride;
    if constexpr (aligned && keys == 4) return ptx::load_global(reinterpret_cast<const unsigned*>(row));
    if constexpr (aligned && keys == 2) return ptx::load_global(reinterpret_cast<const unsigned short*>(row));
    unsigned result = 0;
#pragma unroll
    for (int k = 0; k < keys; ++k) result |= static_cast<unsigned>(row[tile::min(k, known.last)]) << 8 * k;
    return result;
  }

  /// Which of 32 rows from `first` on a key is hidden from: a bit a row.
  __device__ __forceinline__ static unsigned rows_hidden(const int* bounds, int first) {
    const auto before = [&](int which) {  // a bound
      const int row = tile::max(bounds[which], first) - first;
      return row >= 32 ? 0xffffffffu : (1u << row) - 1;
    };
    unsigned result = ~before(0);
    if constexpr (features.hidden_bounds > 1) result &= before(1);
    if constexpr (features.hidden_bounds == 4) result |= ~before(2) & before(3);
    return result;
  }

  /// Bit n of lane l becomes bit l of lane n.
  __device__ __forceinline__ unsigned transposed(unsigned word) const {
    constexpr unsigned low[5] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
#pragma unroll
    for (int step = 4; step >= 0; --step) {  // blocks of so many bits and lanes change places
      const int size = 1 << step;
      const unsigned other = ptx::shuffle_xor(word, size);
      const bool upper = (lane & size) != 0;
      word = upper ? (word & ~low[step]) | (other >> size & low[step]) : (word & low[step]) | (other & low[step]) << size;
    }
    return word;
  }

  /// Whether row n of the warp's rows sees the lane's key number k, by the masks. `hidden_rows` belongs to the key,
  /// `bytes` to the row.
  __device__ __forceinline__ bool sees(const Keys& known, int k, int n, unsigned hidden_rows, const Row& row,
                                       unsigned bytes) const {
    bool hidden = false;
    if constexpr (features.hidden_bounds != 0) hidden = (hidden_rows >> n & 1) != 0;
    if constexpr (features.block_mask) hidden |= data.blocks[row.block * data.blocks_stride + known.column[k]] == 0;
    if constexpr (features.mask) hidden |= (bytes >> 8 * k & 255u) == 0;
    if constexpr (features.mask_program) hidden |= !data.program.visible(row.known, known.known[k]);
    return !hidden;
  }

  template <bool aligned>
  __device__ __forceinline__ Words words_of(const Keys& known, const Row& own, int first) const {
    constexpr int step = together(aligned);
    static_assert(rows % step == 0);
    const int last_row = sequence.len_q - 1;
    unsigned hidden_rows[keys] = {};
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      if constexpr (features.hidden_bounds != 0) hidden_rows[k] = rows_hidden(known.hidden[k], first);
    }
    Words result{};
    if constexpr (features.hidden_bounds != 0 && !features.mask && !features.block_mask && !features.mask_program) {
#pragma unroll
      for (int k = 0; k < keys; ++k) result[k] = transposed(~hidden_rows[k]);
      return result;
    }
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += step) {
      unsigned bytes[step] = {};
#pragma unroll
      for (int n = 0; n < step; ++n) {
        if constexpr (features.mask) bytes[n] = bytes_at<aligned>(known, tile::min(first + begin + n, last_row));
      }
#pragma unroll
      for (int n = 0; n < step; ++n) {
        Row row{};
        if constexpr (features.mask_program) row.known = tile::known_by(own.known, begin + n);
        if constexpr (features.block_mask) row.block = ptx::shuffle(own.block, begin + n);
#pragma unroll
        for (int k = 0; k < keys; ++k) {
          const unsigned word = ptx::ballot(sees(known, k, begin + n, hidden_rows[k], row, bytes[n]));
          result[k] = lane == begin + n ? word : result[k];
        }
      }
    }
    return result;
  }
};

/// Makes the words of 32 tiles of 64 keys, from tile 32 * map_word on, and the rows [q_begin, q_begin + block_q), by
/// all warps of a block. Only blocks that the map shows in part, over all of the rows, get words.
template <Features features, int block_q, int block_kv, int num_warps>
__device__ __forceinline__ void make_words(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                           int q_begin, int map_word, const abi::TileWords& found) {
  constexpr int rows = 32, groups = num_warps / (block_q / rows);  // of a task; groups of warps have different blocks
  constexpr int units = block_kv / abi::mask_unit, blocks = 32 / units;
  constexpr unsigned whole = (1u << units) - 1;
  static_assert(block_q % rows == 0 && num_warps % (block_q / rows) == 0);
  if (q_begin >= sequence.len_q) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = q_begin + warp % (block_q / rows) * rows;
  const WordMaker<features, block_kv, rows> maker{args, sequence, head_idx, lane, {args, sequence, head_idx}};
  const auto own = maker.row_at(first + lane);
  const int row_tile = row_tile_of_words<block_q>(args, sequence.batch_idx, head_idx, q_begin);
  const tile::TileRange range =
      tile::Visibility<features>(args, sequence, head_idx).template key_tiles<block_q, block_kv>(q_begin);
#pragma unroll 1
  for (int n = warp / (block_q / rows); n < blocks; n += groups) {
    const int block = map_word * blocks + n;
    const bool seen = (found.seen >> n * units & whole) != 0, full = (found.full >> n * units & whole) == whole;
    if (!seen || full || block < range.begin || block >= range.end) continue;
    ptx::path<"mask/tile_map words">();
    const auto words = maker.words(maker.keys_at(block * block_kv), own, first);
    ptx::store_global(precomputed_mask_bits<block_q, block_kv>(args, row_tile, block) + (first - q_begin) + lane, words);
  }
}

}  // namespace flash_attention::mask
