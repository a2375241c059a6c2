#pragma once

// The class of a tile under a boolean mask, computed by one thread: for maps without words (tile_map.cuh).

#include "abi/args.h"
#include "abi/tile_map.h"
#include "mask/words.cuh"
#include "ptx/memory.cuh"
#include "ptx/pairs.cuh"
#include "ptx/path.cuh"
#include "ptx/warp.cuh"
#include "tile/sequence.cuh"
#include "tile/visibility.cuh"

namespace flash_attention::mask {

/// The class of the rows [first, last] and the keys of a unit under a boolean mask. Reads 16 bytes at a time if they
/// are aligned, and several rows at the same time.
__device__ __forceinline__ abi::TileClass byte_class(const abi::AttentionArgs& args, const tile::Sequence& sequence,
                                                     int head_idx, int first, int last, int unit) {
  using abi::mask_unit, abi::TileClass;
  constexpr int rows_at_once = 2;
  const int begin = unit * mask_unit, count = tile::min(mask_unit, sequence.rows_kv - begin);
  const auto* const mask = static_cast<const unsigned char*>(args.mask.data) + sequence.batch_idx * args.mask.batch_stride +
                           head_idx * args.mask.head_stride + begin;
  const bool aligned =
      count == mask_unit &&
      (reinterpret_cast<unsigned long long>(mask) | static_cast<unsigned long long>(args.mask.q_stride)) % 16 == 0;
  bool some = false, all = true;
  for (int i = first; i <= last && (all || !some); i += rows_at_once) {
    if (aligned) {
      ptx::Vector<unsigned, 4> words[rows_at_once][mask_unit / 16];
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        const auto* const row =
            reinterpret_cast<const ptx::Vector<unsigned, 4>*>(mask + tile::min(i + r, last) * args.mask.q_stride);
#pragma unroll
        for (int piece = 0; piece < mask_unit / 16; ++piece) words[r][piece] = ptx::load_global(row + piece);
      }
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
#pragma unroll
        for (int x = 0; x < mask_unit / 4; ++x) {
          const unsigned word = words[r][x / 4][x % 4];
          some = some || word != 0;
          all = all && ((word - 0x01010101u) & ~word & 0x80808080u) == 0;  // no byte is 0
        }
      }
    } else {
      for (int r = i; r <= tile::min(i + rows_at_once - 1, last); ++r) {
        for (int j = 0; j < count; ++j) {
          const bool visible = mask[r * args.mask.q_stride + j] != 0;
          some = some || visible;
          all = all && visible;
        }
      }
    }
  }
  return !some ? TileClass::none : all ? TileClass::full : TileClass::partial;
}

// The map of tiles and the words of a boolean mask, if it is the only mask, from one pass over its bytes.
//
// A block takes a row of tiles (64 queries) and 32 tiles of keys. A warp takes 512 of the keys and some of the rows, a
// lane 16 keys. For two rows at a time:
//
//     16 bytes of each row -> a bit a byte                                   bits_of
//     lanes exchange bits: each has a word of one of the rows, and stores it  whole_word
//     which tiles some of the rows see, and which all of the rows see
//
// At the end votes decide whether each tile is hidden, partial or full.

using abi::AttentionArgs, abi::Features, abi::TileWords;

template <Features features, int block_q, int block_kv, int num_warps>
struct ByteRows {
  static constexpr int keys = 16, warp_keys = 32 * keys;                    // of a lane, of a warp
  static constexpr int warps_of_row = 32 * abi::mask_unit / warp_keys;      // side by side
  static constexpr int rows = abi::mask_unit / (num_warps / warps_of_row);  // of a warp
  static constexpr int at_once = 8;                                         // rows whose bytes are in flight
  static_assert(rows % at_once == 0 && num_warps % warps_of_row == 0);
  static_assert(block_kv == 128 || block_kv == 64);
  using Bytes = ptx::Vector<unsigned, 4>;

  struct SharedStorage {
    TileWords found[num_warps];  // a bit for each of a warp's eight tiles
  };

  const AttentionArgs& args;
  const tile::Sequence& sequence;
  const int head_idx;
  const int lane, warp;

  /// The map's words of row `row` of tiles and the 32 tiles of keys of word `map_word`.
  __device__ __forceinline__ void run(SharedStorage& storage, int row, int map_word, TileWords* to) const {
    const int first = row * abi::mask_unit, key_begin = map_word * 32 * abi::mask_unit;
    if (first >= sequence.rows_q) return;
    const tile::TileRange range = tile::Visibility<features>(args, sequence, head_idx)
                                      .template key_tiles<block_q, block_kv>(first / block_q * block_q);
    if (range.end * block_kv <= key_begin || range.begin * block_kv >= key_begin + 32 * abi::mask_unit)
      return;  // no kernel reads this part
    ptx::path<"mask/tile_map words of rows of bytes">();
    const TileWords found =
        take_rows(first + warp / warps_of_row * rows, key_begin + warp % warps_of_row * warp_keys + lane * keys);
    if (lane == 0) storage.found[warp] = found;
    __syncthreads();  // the results of all warps are written
    if (threadIdx.x != 0) return;
    TileWords all{0, 0};
#pragma unroll
    for (int column = 0; column < warps_of_row; ++column) {
      unsigned seen = 0, full = 255;
#pragma unroll
      for (int n = column; n < num_warps; n += warps_of_row) seen |= storage.found[n].seen, full &= storage.found[n].full;
      all.seen |= seen << 8 * column;
      all.full |= (full & seen) << 8 * column;
    }
    *to = all;
  }

 private:
  /// Makes the words of the warp's rows from `first` on; the lane has the keys from `key` on. Returns a bit for each
  /// tile of keys.
  __device__ __forceinline__ TileWords take_rows(int first, int key) const {
    const int count = tile::max(tile::min(sequence.rows_kv - key, keys), 0), last_row = sequence.rows_q - 1;
    const auto* const mask = static_cast<const unsigned char*>(args.mask.data) +
                             sequence.batch_idx * args.mask.batch_stride + head_idx * args.mask.head_stride + key;
    const bool aligned =
        count == keys &&
        (reinterpret_cast<unsigned long long>(mask) | static_cast<unsigned long long>(args.mask.q_stride)) % keys == 0;
    unsigned some = 0, all = 0xffffffffu;
    unsigned* const to = place_of(first, key);
    const bool stores = key / block_kv * block_kv < sequence.rows_kv;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += at_once) {
      Bytes bytes[at_once];
#pragma unroll
      for (int n = 0; n < at_once; ++n)
        bytes[n] = load(mask + tile::min(first + begin + n, last_row) * args.mask.q_stride, count, aligned);
#pragma unroll
      for (int n = 0; n < at_once; n += 2) {
        const unsigned bits = bits_of(bytes[n]), next_bits = bits_of(bytes[n + 1]);
        some |= bits | next_bits;
        all &= bits & next_bits;
        const unsigned word = whole_word(bits, next_bits);
        if (stores) ptx::store_global(to + (begin + n) * (block_kv / 32), word);
      }
    }
    Bytes there;
#pragma unroll
    for (int n = 0; n < keys / 4; ++n) there[n] = first_bytes(count - 4 * n);
    return tiles_of(some != 0, (bits_of(there) & ~all) == 0);
  }

  /// Bytes that do not exist are 0.
  __device__ __forceinline__ static Bytes load(const unsigned char* row, int count, bool aligned) {
    if (aligned) return ptx::load_readonly(reinterpret_cast<const Bytes*>(row));
    Bytes result{};
#pragma unroll
    for (int n = 0; n < keys; ++n) {
      if (n < count) result[n / 4] |= static_cast<unsigned>(row[n]) << 8 * (n % 4);
    }
    return result;
  }
  /// Ones in the first `count` bytes of four.
  __device__ __forceinline__ static unsigned first_bytes(int count) {
    return count >= 4 ? 0x01010101u : count <= 0 ? 0 : 0x01010101u >> 8 * (4 - count);
  }

  /// A bit for each byte that is not 0. With blocks of 128 keys, bit m of byte k belongs to key 4 m + k; with blocks of
  /// 64, to key 2 m + k.
  __device__ __forceinline__ static unsigned bits_of(const Bytes& bytes) {
    unsigned result = 0;
#pragma unroll
    for (int m = 0; m < keys / 4; ++m) {
      const unsigned highest = (((bytes[m] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes[m]) & 0x80808080u;
      const unsigned ones = highest >> 7;
      result |= block_kv == 128 ? highest >> (3 - m) : ((ones | ones >> 15) & 0x0303u) << 2 * m;
    }
    return block_kv == 128 ? result >> 4 : result;
  }

  /// For four lanes that are `distance` apart: byte n of lane m becomes byte m of lane n.
  template <int distance>
  __device__ __forceinline__ unsigned transposed(unsigned own) const {
    const bool odd = lane / distance % 2 != 0, upper = lane / (2 * distance) % 2 != 0;
    const unsigned near = ptx::shuffle_xor(own, distance);
    own = ptx::permute_bytes(own, near, odd ? 0x3715 : 0x6240);
    const unsigned far = ptx::shuffle_xor(own, 2 * distance);
    return ptx::permute_bytes(own, far, upper ? 0x3276 : 0x5410);
  }

  /// Word k of Words. With blocks of 128 keys eight lanes share a block: even lanes get row 0, odd lanes row 1, and
  /// lane l gets word l / 2. With blocks of 64 four lanes share one: lane l gets word l % 2 of row l / 2.
  __device__ __forceinline__ unsigned whole_word(unsigned row0, unsigned row1) const {
    if constexpr (block_kv == 64) return transposed<1>(row0 | row1 << 16);
    const bool odd = lane % 2 != 0;
    const unsigned other = ptx::shuffle_xor(odd ? row0 : row1, 1);
    return transposed<2>(odd ? other | row1 << 4 : row0 | other << 4);
  }
  /// The place of the lane's word of the first two rows. All rows of a tile of 64 follow each other.
  __device__ __forceinline__ unsigned* place_of(int first, int key) const {
    constexpr bool large = block_kv == 128;
    const int row = first + (large ? lane % 2 : lane / 2 % 2), which = large ? lane / 2 % 4 : lane % 2;
    const int row_tile = row_tile_of_words<block_q>(args, sequence.batch_idx, head_idx, first / block_q * block_q);
    auto* const words = precomputed_mask_bits<block_q, block_kv>(args, row_tile, key / block_kv) + row % block_q;
    return &(*words)[which];
  }

  /// Four lanes have the keys of a tile.
  __device__ __forceinline__ TileWords tiles_of(bool sees_some, bool sees_all) const {
    const unsigned some = ptx::ballot(sees_some) >> lane % 8 * 4 & 15, all = ptx::ballot(sees_all) >> lane % 8 * 4 & 15;
    return {ptx::ballot(some != 0) & 255, ptx::ballot(all == 15) & 255};
  }
};

// Words and map if a boolean mask is one of several masks. Its bytes are read once: first the words of all blocks are
// made, and the class of each tile follows from its words.

/// How the warps of a block share 32 tiles of 64 keys and block_q rows: each takes some rows, and of these every n-th
/// block.
template <int block_q, int num_warps>
struct WarpsOfWords {
  static constexpr int rows = 32;                        // of a warp
  static constexpr int rows_ahead = 16;                  // whose bytes are being loaded
  static constexpr int row_groups = block_q / rows;      // with different warps
  static constexpr int takers = num_warps / row_groups;  // warps that share the blocks of a row group
  static constexpr int row_tiles = block_q / abi::mask_unit;
  static_assert(block_q % abi::mask_unit == 0 && num_warps % row_groups == 0);
};

/// The map's bits for the tiles of a block of keys, from the words of 32 rows, one a lane: bits from 0 on.
template <int block_kv>
__device__ __forceinline__ abi::TileWords tiles_of(const Words<block_kv>& words) {
  constexpr int units = block_kv / abi::mask_unit, lanes = 32 / units;
  unsigned some = 0, all = 0xffffffffu;
#pragma unroll
  for (int k = 0; k < block_kv / 32; ++k) some |= words[k], all &= words[k];
  abi::TileWords result{};
#pragma unroll
  for (int unit = 0; unit < units; ++unit) {
    const unsigned keys = 0xffffffffu >> (32 - lanes) << unit * lanes;
    result.seen |= ptx::any((some & keys) != 0) ? 1u << unit : 0u;
    result.full |= ptx::all((all & keys) == keys) ? 1u << unit : 0u;
  }
  return result;
}

/// Makes this warp's words of the tiles from 32 * map_word on and the rows [q_begin, q_begin + block_q). Returns what
/// its rows say about the tiles. Tiles of other warps are returned as full and not seen; so are tiles that do not
/// exist.
template <abi::Features features, int block_q, int block_kv, int num_warps>
__device__ __forceinline__ abi::TileWords make_all_words(const abi::AttentionArgs& args, const tile::Sequence& sequence,
                                                         int head_idx, int q_begin, int map_word) {
  using Warps = WarpsOfWords<block_q, num_warps>;
  constexpr int units = block_kv / abi::mask_unit, blocks = 32 / units;
  abi::TileWords found{0, 0xffffffffu};
  if (q_begin >= sequence.len_q) return found;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = q_begin + warp % Warps::row_groups * Warps::rows;
  const WordMaker<features, block_kv, Warps::rows, Warps::rows_ahead> maker{
      args, sequence, head_idx, lane, {args, sequence, head_idx}};
  const auto own = maker.row_at(first + lane);
  const int row_tile = row_tile_of_words<block_q>(args, sequence.batch_idx, head_idx, q_begin);
  const tile::TileRange range =
      tile::Visibility<features>(args, sequence, head_idx).template key_tiles<block_q, block_kv>(q_begin);
#pragma unroll 1
  for (int n = warp / Warps::row_groups; n < blocks; n += Warps::takers) {
    const int block = map_word * blocks + n;
    abi::TileWords tiles{};
    if (block >= range.begin && block < range.end) {
      ptx::path<"mask/tile_map words of bytes">();
      const auto words = maker.words(maker.keys_at(block * block_kv), own, first);
      ptx::store_global(precomputed_mask_bits<block_q, block_kv>(args, row_tile, block) + (first - q_begin) + lane, words);
      const unsigned inside = block * block_kv + abi::mask_unit < sequence.rows_kv ? 3u : 1u;  // tiles that exist
      tiles = tiles_of<block_kv>(words);
      tiles.seen &= inside, tiles.full &= inside;
    }
    found.seen |= tiles.seen << n * units;
    found.full &= ~((~tiles.full & ((1u << units) - 1)) << n * units);
  }
  return found;
}

}  // namespace flash_attention::mask
