#pragma once

// Precomputes mask bits for backward/sm90, for all heads that share them: a launch before the kernel that attends. It
// makes words for each tile of 64 queries and 64 keys that the map shows in part (mask/tile_map.cuh).
//
// A block takes a row of 32 tiles. Four of its warps stand for a warpgroup of the reader: each thread tests the pairs
// that the reader's thread will hold (mask/votes.cuh):
//
//     for each tile that is seen in part, by four warps:    one word a thread; bit i: is the pair of register i visible

#include "mask/votes.cuh"
#include "ptx/bits.cuh"
#include "ptx/path.cuh"
#include "tile/workspace.cuh"

namespace flash_attention {

using namespace abi;

namespace mask {

/// The address of the words of a tile, those of a warpgroup's threads one after another.
__device__ __forceinline__ unsigned* mask_bits(const AttentionArgs& args, int batch_idx, int head_idx, int q_begin,
                                               int kv_begin) {
  const int map_head = head_idx / (args.heads_q / args.map_heads), map_batch = args.map_batches == 1 ? 0 : batch_idx;
  const int row = (map_batch * args.map_heads + map_head) * tile::ceil_div(args.seq_q, mask_unit) + q_begin / mask_unit;
  const long long place = static_cast<long long>(row) * tile::ceil_div(args.seq_kv, mask_unit) + kv_begin / mask_unit;
  return tile::workspace<unsigned>(args, BackwardSm90Region::mask_words) + place * mask_bits_threads;
}

}  // namespace mask

template <ForwardConfig config>
__device__ __forceinline__ void compute_mask_bits(const AttentionArgs& args) {
  constexpr Features features = config.features;
  constexpr int groups = config.num_warps * 32 / mask_bits_threads * mask_bits_blocks;  // that share a row of tiles
  const int words = map_words(args.seq_kv), row_tiles = tile::ceil_div(args.seq_q, mask_unit);
  const int group = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / mask_bits_threads % groups;
  int index = static_cast<int>(blockIdx.x) / mask_bits_blocks;
  const int q_begin = index % row_tiles * mask_unit;
  index /= row_tiles;
  const int head_idx = index % args.map_heads * (args.heads_q / args.map_heads), batch_idx = index / args.map_heads;
  const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);
  const tile::Visibility<features> sight(args, sequence, head_idx);
  const TileWords* const row = sight.map.rows + q_begin / mask_unit * words;
  const int thread = static_cast<int>(threadIdx.x) % mask_bits_threads, lane = thread % 32;
  int n = 0;  // tiles of the row so far
#pragma unroll 4
  for (int word = 0; word < words; ++word) {
    const TileWords found = row[word];
#pragma unroll 1
    for (unsigned left = found.seen & ~found.full; left != 0; left &= left - 1) {
      if (n++ % groups != group) continue;
      ptx::path<"mask/mask_bits tile">();
      const int kv_begin = (32 * word + ptx::trailing_zeros(left)) * mask_unit;
      const mask::Votes<features, true> votes{sight, q_begin, kv_begin, 16 * (thread / 32) + lane / 4, 2 * (lane % 4)};
      const ptx::Vector<unsigned, 2> visible = votes.visible();
      mask::mask_bits(args, batch_idx, head_idx, q_begin, kv_begin)[thread] = visible[0] | visible[1] << 2;
    }
  }
}

}  // namespace flash_attention
