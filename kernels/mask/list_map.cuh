#pragma once

#include "ptx/launch.cuh"
#include "ptx/shared.cuh"
#include "ptx/warp.cuh"
#include "tile/key_list.cuh"

// Lists of blocks of keys as bits (tile/list_bits.cuh), and the map of tiles that they show (abi/tile_map.h), before
// forward/sm90 and backward/sm90. A thread block takes a row of tiles: 64 rows, which are 64 queries, or fewer with the heads of each. A warp
// takes one of their lists after another, and a lane of it 32 bits:
//
//     for each 1024 bits:
//       for each list, by a warp:      bits = 0;  for each entry: bits |= its block      listed_bits
//                                      bits -> memory
//       for each word of the map:      seen = any list's bits;  full = all lists' bits

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct ListMap {
  static constexpr Features features = config.features;
  static constexpr int keys = features.list_bits;                          // of a bit
  static constexpr int queries = mask_unit / tile::rows_of_query<features>;  // of a row of tiles
  static constexpr int units = keys / mask_unit;                           // of a bit
  static constexpr int step = 32;                                          // words at a time: one for each lane
  static_assert(keys == mask_unit || keys == 2 * mask_unit);

  struct SharedStorage {
    unsigned bits[queries][step];
  };

  /// The bits of a list from bit `begin` on, for each lane 32 of them.
  __device__ __forceinline__ static unsigned listed_bits(const AttentionArgs& args, const tile::KeyListView& list, int len_kv,
                                                         int begin) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = begin + 32 * lane;
    const int bits_of_entry = args.list_block_kv / keys, blocks = tile::ceil_div(len_kv, args.list_block_kv);
    const int last = tile::ceil_div(args.seq_kv, keys);
    unsigned bits = 0;
#pragma unroll 1
    for (int base = 0; base < list.count; base += 32) {
      const int own = base + lane < list.count ? list.entries[base + lane] : -1;
      const int named = own >= 0 && own < blocks ? own : -1;
#pragma unroll 4
      for (int e = 0; e < tile::min(32, list.count - base); ++e) {
        const int block = ptx::shuffle(named, e);
        const int from = tile::max(block * bits_of_entry - first, 0);
        const int to = tile::min(tile::min((block + 1) * bits_of_entry, last) - first, 32);
        if (block >= 0 && from < to) bits |= (0xffffffffu >> (32 - (to - from))) << from;
      }
    }
    return bits;
  }

  /// Each of 16 bits twice.
  __device__ __forceinline__ static unsigned doubled(unsigned bits) {
    bits = (bits | bits << 8) & 0x00ff00ffu;
    bits = (bits | bits << 4) & 0x0f0f0f0fu;
    bits = (bits | bits << 2) & 0x33333333u;
    bits = (bits | bits << 1) & 0x55555555u;
    return bits | bits << 1;
  }
  /// A word of the map, whose bits are for 64 keys each, from the words of lists that it is in.
  __device__ __forceinline__ static unsigned map_word(unsigned bits, int word) {
    return units == 1 ? bits : doubled(bits >> word % 2 * 16 & 0xffffu);
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void mask_list_map(const AttentionArgs& args) {
  using Map = ListMap<config>;
  constexpr Features features = config.features;
  ptx::griddepcontrol_launch_dependents();
  auto& storage = ptx::shared_storage<typename Map::SharedStorage>();
  const int rows = tile::ceil_div(args.seq_q, mask_unit), row = static_cast<int>(blockIdx.x) % rows;
  const int rest = static_cast<int>(blockIdx.x) / rows, list_head = rest % args.list_heads;
  const int head_idx = list_head * (args.heads_q / args.list_heads);
  const tile::Sequence sequence = tile::make_sequence<features>(args, rest / args.list_heads);
  const tile::ListBits<features> lists(args, sequence, head_idx);
  const tile::TileMap<features> map(args, sequence, head_idx);
  const int q_begin = row * Map::queries, all_queries = args.seq_q / tile::rows_of_query<features>;
  const int q_last = tile::min(q_begin + Map::queries, all_queries) - 1;
  const int first = q_begin / args.list_block_q, count = q_last / args.list_block_q - first + 1;
  const long long lists_before =
      static_cast<long long>(sequence.batch_idx) * tile::ceil_div(all_queries, args.list_block_q) + first;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int begin = 0; begin < lists.row_words; begin += Map::step) {
    const int words = tile::min(Map::step, lists.row_words - begin);
#pragma unroll 1
    for (int n = warp; n < count; n += config.num_warps) {
      const tile::KeyListView list(args, (lists_before + n) * args.list_heads + list_head);
      const unsigned bits = Map::listed_bits(args, list, sequence.len_kv, 32 * begin);
      storage.bits[n][lane] = bits;
      // A list of several rows of tiles is written by the first of them.
      if (lane < words && (first + n) * args.list_block_q >= q_begin) lists.list(first + n)[begin + lane] = bits;
    }
    __syncthreads();  // the bits of all lists are there
    const int map_begin = begin * Map::units, map_end = tile::min((begin + words) * Map::units, map.words);
    for (int word = map_begin + static_cast<int>(threadIdx.x); word < map_end; word += 32 * config.num_warps) {
      unsigned seen = 0, full = 0xffffffffu;
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const unsigned bits = storage.bits[n][word / Map::units - begin];
        seen |= bits, full &= bits;
      }
      map.rows[static_cast<long long>(row) * map.words + word] = {Map::map_word(seen, word), Map::map_word(full, word)};
    }
    __syncthreads();  // the bits have been read
  }
}

/// The same map by columns, for the backward pass: of each tile of keys a bit for every row of tiles. A warp takes 32 by 32
/// tiles: lane n reads a word of row n, and votes turn them into words of columns.
template <ForwardConfig config>
__device__ __forceinline__ void mask_list_columns(const AttentionArgs& args) {
  constexpr Features features = config.features;
  const int row_words = map_words(args.seq_q), words = map_words(args.seq_kv);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int task = static_cast<int>(blockIdx.x) * config.num_warps + warp;
  if (task >= row_words * words * args.list_heads * args.batch) return;
  const int word = task % words;
  task /= words;
  const int row_word = task % row_words;
  task /= row_words;
  const int head_idx = task % args.list_heads * (args.heads_q / args.list_heads);
  const tile::Sequence sequence = tile::make_sequence<features>(args, task / args.list_heads);
  const tile::TileMap<features> map(args, sequence, head_idx);
  const int row = 32 * row_word + lane, column = 32 * word + lane;
  const unsigned seen = row * mask_unit < args.seq_q ? map.rows[static_cast<long long>(row) * words + word].seen : 0;
  unsigned own = 0;
#pragma unroll 4
  for (int n = 0; n < 32; ++n) {
    const unsigned found = ptx::ballot((seen >> n & 1) != 0);
    if (n == lane) own = found;
  }
  unsigned* const columns = tile::map_columns<features>(args, sequence, head_idx);
  if (column * mask_unit < args.seq_kv) columns[static_cast<long long>(column) * row_words + row_word] = own;
}

}  // namespace flash_attention
