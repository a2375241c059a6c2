#pragma once

#include "abi/tile_map.h"
#include "tile/sequence.cuh"
#include "tile/workspace.cuh"

// Lists of blocks of keys as bits, which mask/list_map.cuh makes: [batch, list heads, lists of a sequence, words], a bit for
// Features::list_bits keys.

namespace flash_attention::tile {

/// The lists of one sequence and query head.
template <Features features>
struct ListBits {
  static constexpr int keys = features.list_bits;

  unsigned* lists;
  int row_words;  // of a list
  int block_q;    // queries of a list

  __device__ __forceinline__ ListBits(const AttentionArgs& args, const Sequence& sequence, int head_idx) {
    if constexpr (keys != 0) {
      row_words = list_words(args.seq_kv, keys);
      block_q = args.list_block_q;
      const int head = head_idx / (args.heads_q / args.list_heads);
      const int queries = args.seq_q / rows_of_query<features>;
      const long long first = (static_cast<long long>(sequence.batch_idx) * args.list_heads + head) *
                              (features.list_of_query ? queries : ceil_div(queries, block_q));
      lists = workspace<unsigned>(args, SharedRegion::list_bits) + first * row_words;
    }
  }

  __device__ __forceinline__ unsigned* list(int idx) const { return lists + static_cast<long long>(idx) * row_words; }

  /// The words of row i.
  __device__ __forceinline__ const unsigned* row(int i) const {
    const int query = i / rows_of_query<features>;
    return list(features.list_of_query ? query : query / block_q);
  }
  /// Whether the list of row i names the block of key j.
  __device__ __forceinline__ bool shows(int i, int j) const { return (row(i)[j / keys / 32] >> j / keys % 32 & 1) != 0; }
};

}  // namespace flash_attention::tile
