#pragma once

// The map of tiles and the words of a mask program, if it is the only mask.
//
// A block takes the queries of a tile of the kernel and 256 tiles of 64 keys:
//
//     for each query, by a thread: the program's data of the query, for all keys                   keep_rows
//     for each tile of keys, by a warp: the range of the program's tensors there                   keep_seen_keys
//     for each row of tiles, 32 tiles of keys, by a warp: a lane classifies one                    classify
//     the list of blocks of keys that are seen in part                                             list_blocks
//     for each of them, 32 of its keys, by a warp: a lane has a key                                make_words
//       for each term of the mask, for each row whose term differs from that of the row before: a vote

#include "mask/words.cuh"
#include "ptx/bits.cuh"
#include "ptx/path.cuh"
#include "ptx/shared.cuh"
#include "ptx/warp.cuh"
#include "tile/visibility.cuh"

namespace flash_attention::mask {

using abi::TileWords;

/// Finds the ranges of a program's tensors in each of `count` tiles of keys from `first` on, by the warps of a block.
/// Eight lanes share a tile.
template <int num_warps, typename Program>
__device__ __forceinline__ void keep_seen_keys(const Program& program, int first, int count, int rows_kv,
                                               typename Program::SeenKeys* to) {
  if constexpr (__is_empty(typename Program::SeenKeys)) return;
  constexpr int lanes = tile::program::range_lanes, tiles = 32 / lanes;  // tiles that a warp does at the same time
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int there = tile::min(count, tile::ceil_div(rows_kv, abi::mask_unit) - first);
#pragma unroll 1
  for (int begin = tiles * warp; begin < there; begin += tiles * num_warps) {
    const int n = begin + lane / lanes, key = (first + tile::min(n, there - 1)) * abi::mask_unit;
    const auto found = program.seen_keys(key, tile::min(key + abi::mask_unit, rows_kv));
    if (lane % lanes == 0 && n < there) to[n] = found;
  }
}

template <abi::ForwardConfig config>
struct ProgramRows {
  static constexpr abi::Features features = config.features;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, num_warps = config.num_warps;
  static constexpr int row_tiles = block_q / abi::mask_unit, groups = block_q / 32;
  static constexpr int units = block_kv / abi::mask_unit, blocks_of_word = 32 / units;
  static constexpr int map_words = abi::program_map_words;  // of a block
  static constexpr int keys = block_kv / 32;                // words of a row and block
  using Program = tile::Program<features.mask_program>;
  using Row = typename Program::Row;
  using SeenKeys = typename Program::SeenKeys;
  static constexpr bool keeps_rows = sizeof(Row) <= abi::program_row_bytes, reads_keys = !__is_empty(SeenKeys);

  struct SharedStorage {
    Row rows[keeps_rows ? block_q : 1];
    SeenKeys seen_keys[reads_keys ? 32 * map_words : 1];
    TileWords found[row_tiles][map_words];
    unsigned starts[Program::num_terms][groups];  // a bit for each row whose term differs from that of the row before
    unsigned short tested[map_words * blocks_of_word];
  };
  static_assert(sizeof(SharedStorage) <= abi::program_map_bytes, "the planner reserves as much");

  const abi::AttentionArgs& args;
  const tile::Sequence& sequence;
  const int head_idx, q_begin, first_word;  // of the map
  const Program& program;
  SharedStorage& storage;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  /// Makes this block's part of the words, and the map. `map` is its row of q_begin.
  __device__ __forceinline__ void run(TileWords* map, int words, int part, int parts) const {
    const tile::TileRange range =
        tile::Visibility<features>(args, sequence, head_idx).template key_tiles<block_q, block_kv>(q_begin);
    keep_rows();
    keep_seen_keys<num_warps>(program, 32 * first_word, 32 * map_words, sequence.rows_kv, storage.seen_keys);
    __syncthreads();  // the data of all rows and keys is written
    find_starts();
    classify(map, words, part == 0);
    __syncthreads();  // the classes of all tiles are written
    const int count = list_blocks(range);
    __syncthreads();  // the list of blocks is written
    make_words(count, part, parts);
  }

 private:
  __device__ __forceinline__ Row row_at(int n) const {
    if constexpr (keeps_rows) return storage.rows[n];
    return program.row(tile::min(q_begin + n, sequence.len_q - 1));
  }

  __device__ __forceinline__ void keep_rows() const {
    if constexpr (!keeps_rows) return;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < block_q; n += 32 * num_warps)
      storage.rows[n] = program.row(tile::min(q_begin + n, sequence.len_q - 1));
  }

  template <int term = 0>
  __device__ __forceinline__ void find_starts() const {
    if constexpr (term < Program::num_terms) {
#pragma unroll 1
      for (int group = warp; group < groups; group += num_warps) {
        const int n = 32 * group + lane;
        const bool differs = lane == 0 || !program.template alike<term>(row_at(n), row_at(tile::max(n - 1, 0)));
        const unsigned starts = ptx::ballot(differs);
        if (lane == 0) storage.starts[term][group] = starts;
      }
      find_starts<term + 1>();
    }
  }

  __device__ __forceinline__ void classify(TileWords* map, int words, bool stores) const {
#pragma unroll 1
    for (int step = warp; step < row_tiles * map_words; step += num_warps) {
      const int row = step / map_words, word = step % map_words;
      const int first = q_begin + row * abi::mask_unit, key = (32 * (first_word + word) + lane) * abi::mask_unit;
      const bool inside = first < sequence.rows_q && first_word + word < words;
      abi::interval::Bools seen{false, true};
      if (inside && key < sequence.rows_kv)
        seen = program.seen(first, tile::min(first + abi::mask_unit, sequence.rows_q), key,
                            tile::min(key + abi::mask_unit, sequence.rows_kv),
                            storage.seen_keys[reads_keys ? 32 * word + lane : 0]);
      const TileWords found{ptx::ballot(seen.can_be_true), ptx::ballot(!seen.can_be_false)};
      if (lane != 0) continue;
      storage.found[row][word] = inside ? found : TileWords{0, 0xffffffffu};
      if (stores && inside) map[row * words + first_word + word] = found;
    }
  }

  /// Lists the blocks of keys that are seen in part. Returns their number.
  __device__ __forceinline__ int list_blocks(const tile::TileRange& range) const {
    int count = 0;
#pragma unroll
    for (int word = 0; word < map_words; ++word) {
      TileWords found = storage.found[0][word];
#pragma unroll
      for (int row = 1; row < row_tiles; ++row)
        found.seen |= storage.found[row][word].seen, found.full &= storage.found[row][word].full;
      constexpr unsigned whole = (1u << units) - 1;
      const int block = (first_word + word) * blocks_of_word + lane, shift = lane % blocks_of_word * units;
      const bool inside = lane < blocks_of_word && block >= range.begin && block < range.end;
      const bool seen = (found.seen >> shift & whole) != 0, full = (found.full >> shift & whole) == whole;
      const unsigned tested = ptx::ballot(inside && seen && !full);
      if (warp == word % num_warps && (tested >> lane & 1) != 0)
        storage.tested[count + ptx::count_ones(tested & ((1u << lane) - 1))] = static_cast<unsigned short>(block);
      count += ptx::count_ones(tested);
    }
    return count;
  }

  __device__ __forceinline__ void make_words(int count, int part, int parts) const {
    const int row_tile = row_tile_of_words<block_q>(args, sequence.batch_idx, head_idx, q_begin);
#pragma unroll 1
    for (int task = part * num_warps + warp; task < count * keys; task += parts * num_warps) {
      ptx::path<"mask/tile_map words of a program">();
      const int block = storage.tested[task / keys], which = task % keys;
      const auto key = program.key(tile::min(block * block_kv + lane * keys + which, sequence.visible_kv - 1));
      auto* const to = precomputed_mask_bits<block_q, block_kv>(args, row_tile, block);
#pragma unroll 1
      for (int group = 0; group < groups; ++group) ptx::store_global(&to[32 * group + lane][which], words_of(key, group));
    }
  }

  /// The keys of 32, one a lane, that row `lane` of 32 sees by the terms from this one on.
  template <int term = 0>
  __device__ __forceinline__ unsigned words_of(const typename Program::Key& key, int group) const {
    if constexpr (term == Program::num_terms) {
      return 0xffffffffu;
    } else {
      unsigned starts = storage.starts[term][group], result = 0;
      const auto ask = [&](int n) {
        const unsigned word = ptx::ballot(program.template term_sees<term>(row_at(32 * group + n), key));
        result = lane >= n ? word : result;
      };
      if (starts == 0xffffffffu) {
#pragma unroll 4
        for (int n = 0; n < 32; ++n) ask(n);
      } else {
#pragma unroll 1
        for (; starts != 0; starts &= starts - 1) ask(ptx::trailing_zeros(starts));
      }
      return result & words_of<term + 1>(key, group);
    }
  }
};

template <abi::ForwardConfig config>
__device__ __forceinline__ void map_program(const abi::AttentionArgs& args) {
  using Rows = ProgramRows<config>;
  const int words = abi::map_words(args.seq_kv), chunks = tile::ceil_div(words, abi::program_map_words);
  const int parts = abi::program_map_parts(abi::program_map_blocks(config.block_q, args.seq_q, args.seq_kv));
  int index = static_cast<int>(blockIdx.x);
  const int part = index % parts;
  index /= parts;
  const int first_word = index % chunks * abi::program_map_words;
  index /= chunks;
  const int row_tiles = tile::ceil_div(args.seq_q, config.block_q), q_begin = index % row_tiles * config.block_q;
  index /= row_tiles;
  const int head_idx = index % args.map_heads * (args.heads_q / args.map_heads), batch_idx = index / args.map_heads;
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, batch_idx);
  if (q_begin >= sequence.rows_q) return;
  const typename Rows::Program program(args, batch_idx, head_idx);
  const tile::TileMap<config.features> map(args, sequence, head_idx);
  const Rows rows{
      args, sequence, head_idx, q_begin, first_word, program, ptx::shared_storage<typename Rows::SharedStorage>()};
  rows.run(map.rows + q_begin / abi::mask_unit * words, words, part, parts);
}

}  // namespace flash_attention::mask
