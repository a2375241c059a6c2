#pragma once

// The steps of a task of backward/sm90 if masks choose: the query tiles that see something of its keys, head after
// head. The list is in shared memory with its task, since the producer warp has few registers.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/bits.cuh"

namespace flash_attention::backward_sm90 {

template <bool present>
struct StepColumns {
  const unsigned* columns;  // the map's words for the task's first tile of keys and first head: abi/tile_map.h
  const TileWords* rows;    // the first tile of queries, with the bits of the task's tiles of keys
  long long head_stride;    // of columns: words from a head to the next
  long long row_stride;     // of rows
  int row_words;            // words of a row
  int words;                // words of a column
  int units;                // columns of a task
};
template <>
struct StepColumns<false> {};

template <BackwardConfig config>
struct StepList : StepColumns<Shape<config>::listed> {
  static constexpr Features features = config.features;
  static constexpr bool present = Shape<config>::listed;

  __device__ __forceinline__ void set(const AttentionArgs& args, const tile::Sequence& sequence, int head_idx,
                                      int kv_begin) {
    this->words = map_words(args.seq_q);
    this->columns = tile::map_columns<features>(args, sequence, head_idx) + kv_begin / mask_unit * this->words;
    const tile::TileMap<features> map(args, sequence, head_idx);
    this->rows = map.rows + kv_begin / mask_unit / 32;
    this->row_words = map.words;
    this->head_stride = this->row_stride = 0;
    if (args.map_heads == args.heads_q) {
      this->head_stride = map_rows(features.packed, args.map_batches, args.seq_kv, args.total_kv) * this->words;
      this->row_stride = map_rows(features.packed, args.map_batches, args.seq_q, args.total_q) * this->row_words;
    }
    this->units = tile::min(config.block_kv / mask_unit, tile::ceil_div(sequence.rows_kv - kv_begin, mask_unit));
  }

  /// Word w of head `head` of the task, of the tiles in the range.
  __device__ __forceinline__ unsigned word(const tile::TileRange& tiles, int head, int w) const {
    static_assert(config.block_kv == 2 * mask_unit || !present);  // two loads, which do not wait for each other
    const unsigned* const first = this->columns + head * this->head_stride + w;
    unsigned seen = first[0];
    seen |= this->units > 1 ? first[this->words] : 0;
    const int begin = tiles.begin - 32 * w, end = tiles.end - 32 * w;
    if (begin > 0) seen = begin < 32 ? seen >> begin << begin : 0;
    if (end < 32) seen = end > 0 ? seen << (32 - end) >> (32 - end) : 0;
    return seen;
  }

  /// The number of steps of `heads` heads.
  __device__ __forceinline__ int count(const tile::TileRange& tiles, int heads) const {
    int steps = 0;
    if (tiles.begin >= tiles.end) return steps;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
#pragma unroll 4
      for (int w = tiles.begin / 32; w <= (tiles.end - 1) / 32; ++w) steps += ptx::count_ones(word(tiles, head, w));
    }
    return steps;
  }

  /// The map's bits for a tile of queries and the task's tiles of keys: bits 0 and 1.
  __device__ __forceinline__ TileWords of(int head, int q_tile, int kv_begin) const {
    const TileWords found = this->rows[head * this->row_stride + static_cast<long long>(q_tile) * this->row_words];
    const int first = kv_begin / mask_unit % 32;
    return {found.seen >> first, found.full >> first};
  }

  /// The first listed tile from q_tile on, or tiles.end.
  __device__ __forceinline__ int seek(const tile::TileRange& tiles, int head, int q_tile) const {
#pragma unroll 1
    while (q_tile < tiles.end) {
      const unsigned left = word(tiles, head, q_tile / 32) >> q_tile % 32;
      if (left != 0) return q_tile + ptx::trailing_zeros(left);
      q_tile = q_tile / 32 * 32 + 32;
    }
    return tiles.end;
  }
};

}  // namespace flash_attention::backward_sm90
