#pragma once

#include "ptx/atomic.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "tile/tile_map.cuh"

// Of the tiles of 64 queries and 64 keys that mask/tile_map.cuh found between hidden and open: which pairs are visible, a
// bit each (abi/tile_map.h). What intervals of a program could not tell is now known: such a tile may turn out hidden or
// open after all. Kernels that attend read bits and no masks, so one of them serves all masks.
//
// A block takes a row of 32 tiles, a warp a tile at a time. A lane has two keys; a vote makes the words of a query.

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct MaskBits {
  static constexpr Features features = config.features;

  struct SharedStorage {
    TileClass found[32];
  };

  /// Of lane l: the words of the queries l and l + 32.
  struct Words {
    unsigned at[2][2];  // [query / 32][key / 32]
  };

  const AttentionArgs& args;
  const tile::Sequence sequence;
  const int head_idx;
  const tile::MaskData<features> data;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  /// Hidden rows alone: the words of a key follow from its bounds.
  __device__ __forceinline__ Words of_bounds(int row, int unit) const {
    const int first = row * mask_unit, num_rows = tile::min(mask_unit, sequence.rows_q - first);
    const auto below = [](int count, int part) {  // the queries before `count` that word `part` is about
      const int bits = tile::max(0, tile::min(count - 32 * part, 32));
      return bits == 32 ? 0xffffffffu : (1u << bits) - 1;
    };
    Words keys{}, queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = unit * mask_unit + 32 * half + lane;
      if (key >= sequence.rows_kv) continue;
      const int* bounds = data.rows + key * features.hidden_bounds;
#pragma unroll
      for (int part = 0; part < 2; ++part) keys.at[half][part] = below(num_rows, part);
#pragma unroll
      for (int which = 0; which < (features.hidden_bounds == 4 ? 2 : 1); ++which) {
        const int begin = tile::max(bounds[2 * which], first) - first;  // no overflow
        const int end = features.hidden_bounds == 1 ? mask_unit : tile::max(bounds[2 * which + 1], first) - first;
#pragma unroll
        for (int part = 0; part < 2; ++part) keys.at[half][part] &= ~(below(end, part) & ~below(begin, part));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) queries.at[n % 2][n / 2] = transposed(keys.at[n / 2][n % 2]);
    return queries;
  }

  /// Masks that are functions of the indices.
  __device__ __forceinline__ Words computed(int row, int unit) const {
    const int rows_end = tile::min((row + 1) * mask_unit, sequence.rows_q) - row * mask_unit;
    int keys[2];
    bool exists[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = unit * mask_unit + 32 * half + lane;
      exists[half] = key < sequence.rows_kv;
      keys[half] = tile::min(key, sequence.rows_kv - 1);
    }
    constexpr int bounds = features.hidden_bounds != 0 ? features.hidden_bounds : 1;
    int hidden[2][bounds];  // read once a tile
    if constexpr (features.hidden_bounds != 0) {
#pragma unroll
      for (int n = 0; n < 2 * bounds; ++n)
        hidden[n / bounds][n % bounds] = data.rows[keys[n / bounds] * bounds + n % bounds];
    }
    Words words{};
#pragma unroll 1
    for (int q = 0; q < rows_end; ++q) {
      const int i = row * mask_unit + q;
      unsigned found[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bool visible = exists[half];
        if constexpr (features.hidden_bounds != 0) visible = visible && !hides(hidden[half], bounds, i);
        if constexpr (features.block_mask)
          visible = visible && data.blocks[i / data.block_q * data.blocks_stride + keys[half] / data.block_kv] != 0;
        if constexpr (features.mask_program) visible = visible && data.program.visible(i, keys[half]);
        found[half] = ptx::ballot(visible);
      }
      if (q % 32 != lane) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) (q < 32 ? words.at[0] : words.at[1])[half] = found[half];
    }
    return words;
  }

  /// Bit n: byte n of the word is not 0.
  __device__ __forceinline__ static unsigned nonzero_bytes(unsigned word) {
    const unsigned high = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
    return (high >> 7) * 0x01020408u >> 24 & 15;
  }

  /// A boolean mask: 16 bytes to a lane and 8 queries at a time, where they lie so.
  __device__ __forceinline__ Words of_bytes(int row, int unit) const {
    const int first = row * mask_unit, begin = unit * mask_unit;
    const int num_rows = tile::min(mask_unit, sequence.rows_q - first);
    const int num_keys = tile::min(mask_unit, sequence.rows_kv - begin);
    const auto* bytes = static_cast<const unsigned char*>(args.mask.data) + sequence.batch_idx * args.mask.batch_stride +
                        head_idx * args.mask.head_stride + first * args.mask.q_stride + begin;
    const bool aligned =
        num_keys == mask_unit &&
        (reinterpret_cast<unsigned long long>(bytes) | static_cast<unsigned long long>(args.mask.q_stride)) % 16 == 0;
    Words words{};
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const int q = 8 * part + lane / 4, key = 16 * (lane % 4);
      unsigned found = 0;  // of 16 keys
      if (aligned && q < num_rows) {
        const auto four =
            ptx::load_global(reinterpret_cast<const ptx::Vector<unsigned, 4>*>(bytes + q * args.mask.q_stride + key));
#pragma unroll
        for (int x = 0; x < 4; ++x) found |= nonzero_bytes(four[x]) << 4 * x;
      } else if (q < num_rows) {
        for (int x = 0; x < tile::min(16, num_keys - key); ++x)
          found |= bytes[q * args.mask.q_stride + key + x] != 0 ? 1u << x : 0u;
      }
      found |= ptx::shuffle_xor(found, 1) << 16;  // an even lane has 32 keys
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned word = ptx::shuffle(found, 4 * (lane % 8) + 2 * half);
        if (lane / 8 == part % 4) words.at[part / 4][half] = word;
      }
    }
    return words;
  }

  __device__ __forceinline__ Words words_of(int row, int unit) const {
    constexpr bool computes = features.hidden_bounds != 0 || features.block_mask || features.mask_program;
    Words words{};
    if constexpr (computes && !features.block_mask && !features.mask_program) {
      words = of_bounds(row, unit);
    } else if constexpr (computes) {
      words = computed(row, unit);
    }
    if constexpr (features.mask) {
      const Words bytes = of_bytes(row, unit);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned& word = words.at[n / 2][n % 2];
        word = computes ? word & bytes.at[n / 2][n % 2] : bytes.at[n / 2][n % 2];
      }
    }
    return words;
  }

  /// Bit b of lane l becomes bit l of lane b.
  __device__ __forceinline__ unsigned transposed(unsigned word) const {
    unsigned stay = 0x0000ffffu;  // bits that an upper lane keeps
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const unsigned other = ptx::shuffle_xor(word, distance);
      word =
          (lane & distance) == 0 ? (word & stay) | (other & stay) << distance : (word & ~stay) | (other >> distance & stay);
      stay ^= stay << distance / 2;
    }
    return word;
  }

  __device__ __forceinline__ void write(unsigned* to, const Words& words) const {
    using Line = typename tile::TileMap<features>::Line;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::store_global(reinterpret_cast<Line*>(to) + 32 * half + lane, Line{words.at[half][0], words.at[half][1]});
  }

  /// The bits of a tile to memory; what all of them say.
  __device__ __forceinline__ TileClass make(const tile::TileMap<features>& map, int row, int unit) const {
    const Words words = words_of(row, unit);
    write(map.bits_of(row, unit), words);
    if constexpr (features.mask_bits == 2) {
      Words keys;
#pragma unroll
      for (int n = 0; n < 4; ++n) keys.at[n % 2][n / 2] = transposed(words.at[n / 2][n % 2]);
      write(map.bits_of(row, unit) + bit_tile_words, keys);
    }
    const int num_rows = tile::min(mask_unit, sequence.rows_q - row * mask_unit);
    const int num_keys = tile::min(mask_unit, sequence.rows_kv - unit * mask_unit);
    bool some = false, all = true;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int keys = tile::max(0, tile::min(32, num_keys - 32 * (n % 2)));
      const unsigned whole = keys == 32 ? 0xffffffffu : (1u << keys) - 1;
      some = some || words.at[n / 2][n % 2] != 0;
      all = all && (32 * (n / 2) + lane >= num_rows || words.at[n / 2][n % 2] == whole);
    }
    return !ptx::any(some) ? TileClass::none : ptx::all(all) ? TileClass::full : TileClass::partial;
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void mask_bits(const AttentionArgs& args) {
  using Bits = MaskBits<config>;
  constexpr Features features = config.features;
  auto& storage = ptx::shared_storage<typename Bits::SharedStorage>();
  const int words = map_words(args.seq_kv), row_tiles = map_units(args.seq_q);
  int index = static_cast<int>(blockIdx.x);
  const int word = index % words;
  index /= words;
  const int row = index % row_tiles;
  index /= row_tiles;
  const int head_idx = index % args.map_heads * (args.heads_q / args.map_heads), batch_idx = index / args.map_heads;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  if (row * mask_unit >= sequence.rows_q) return;
  const Bits bits{args, sequence, head_idx, {args, sequence, head_idx}};
  const tile::TileMap<features> map(args, sequence, head_idx);
  TileWords& classes = map.rows[row * words + word];
  const TileWords before = classes;
  const unsigned between = before.seen & ~before.full;
  if (between == 0) return;

  const int warp = static_cast<int>(threadIdx.x) / 32;
  int count = 0;
#pragma unroll 1
  for (unsigned left = between; left != 0; left &= left - 1, ++count) {
    if (count % config.num_warps != warp) continue;
    const int n = ptx::trailing_zeros(left);
    const TileClass found = bits.make(map, row, 32 * word + n);
    if (bits.lane == 0) storage.found[n] = found;
  }
  __syncthreads();  // all tiles are known
  if (warp != 0) return;
  const bool asked = (between >> bits.lane & 1) != 0;
  const unsigned none = ptx::ballot(asked && storage.found[bits.lane] == TileClass::none);
  const unsigned full = ptx::ballot(asked && storage.found[bits.lane] == TileClass::full);
  if (bits.lane == 0) classes = {before.seen & ~none, before.full | full};
  if constexpr (features.mask_bits == 2) {
    if ((none >> bits.lane & 1) == 0) return;
    unsigned* column =
        tile::map_columns<features>(args, sequence, head_idx) + (32 * word + bits.lane) * map_words(args.seq_q);
    ptx::reduce_and(column + row / 32, ~(1u << row % 32));
  }
}

}  // namespace flash_attention
