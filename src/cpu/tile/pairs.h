#pragma once

// Products over bfloat16 with instructions for pairs: C[row][lane] (+)= sum over k of A[row][k] * B[k][lane]. A 32-bit
// word of B holds B[k][lane] and B[k + 1][lane] for an even k. A is used in place, so a row of A is a row of words,
// too. An instruction set provides such products as a type:
//
//     row_unit, depth_unit              rows and depth are multiples of these
//     begin(), end()                    around all products of an item
//     round(x)                          a vector rounded to bfloat16
//     pair(low, high)                   a word a lane of two values each, rounded
//     multiply<start>(PairProduct)
//
// This file also packs rows of tensors for them.

#include "cpu/tile/lanes.h"
#include "cpu/tile/multiply.h"

namespace flash_attention::cpu {
namespace {

using Half = std::uint16_t;

struct PairProduct {
  const Half* A;  // [rows][depth]
  std::int64_t a_stride;
  const float* B;  // words [depth / 2][lanes]
  std::int64_t b_stride;
  float* C;  // [rows][lanes]
  std::int64_t c_stride;
  int rows, depth, lanes;
};

FLASH_ATTENTION_INLINE Short load_halves(const Half* from, int count) {
  return count >= vector_lanes ? load(from) : load_first(from, count);
}

/// The largest bits without sign in some rows of halves. Inf and NaN have 0x7f80 or more.
struct LargestBits {
  Short lanes{};

  FLASH_ATTENTION_INLINE void take(Short values) {
    const Short magnitude = values & 0x7fff;
    lanes = lanes > magnitude ? lanes : magnitude;
  }
  bool all_finite() const {
    bool finite = true;
    for (int lane = 0; lane < vector_lanes; ++lane) finite = finite && lanes[lane] < 0x7f80;
    return finite;
  }
};

/// A row, padded with 0 to `stride` columns, a multiple of 16.
inline void copy_halves(const Half* from, int columns, Half* to, int stride, LargestBits& largest) {
  for (int c = 0; c < stride; c += vector_lanes) {
    const Short values = load_halves(from + c, columns - c);
    largest.take(values);
    store(to + c, values);
  }
}

/// Words of two rows: row 0 in the low halves.
FLASH_ATTENTION_INLINE Vec interleave(Short low, Short high) {
  return (Vec)(__builtin_convertvector(low, Uint) | (__builtin_convertvector(high, Uint) << 16));
}

/// to[column * to_stride + row] of rows [0, rows) that are `stride` apart and padded to 16 columns; rows is a multiple
/// of 2 * vector_lanes.
inline void transpose_halves(const Half* from, int stride, int rows, int columns, Half* to, int to_stride) {
  for (int row = 0; row < rows; row += 2 * vector_lanes) {
    for (int column = 0; column < columns; column += vector_lanes) {
      Vec square[vector_lanes];
      for (int pair = 0; pair < vector_lanes; ++pair) {
        const Half* two = from + (row + 2 * pair) * stride + column;
        square[pair] = interleave(load_halves(two, vector_lanes), load_halves(two + stride, vector_lanes));
      }
      transpose(square);
      for (int c = 0; c < vector_lanes; ++c) {
        *reinterpret_cast<VecInMemory*>(to + static_cast<std::int64_t>(column + c) * to_stride + row) = square[c];
      }
    }
  }
}

/// One tile of keys of a key head, in the tensors' rows.
struct KeyTile {
  std::int64_t batch, first;
  int kv_head;
  int count;   // in use
  int padded;  // that products may read

  KeyTile(const Call& call, std::int64_t batch_idx, int kv_head_idx, std::int64_t tile)
      : batch(batch_idx), kv_head(kv_head_idx) {
    const Sequence sequence(call, batch);
    first = sequence.kv_begin + tile * block_kv;
    const std::int64_t left = larger<std::int64_t>(sequence.kv_used - tile * block_kv, 0);
    count = static_cast<int>(smaller<std::int64_t>(left, block_kv));
    padded = round_up(count, 32);
  }
  const Half* row(const TensorView& tensor, int key) const {
    return reinterpret_cast<const Half*>(tensor.data) + batch * tensor.batch_stride + (first + key) * tensor.seq_stride +
           kv_head * tensor.head_stride;
  }
};

/// One item for each tile of keys.
inline std::int64_t pack_items(const Call& call) { return call.batch * call.heads_kv * ceil_div(call.seq_kv, block_kv); }

/// Loads rows of a block of a query-side tensor into lanes, words of two columns: to[column / 2][lane], padded with 0.
inline void gather_pairs(const Call& call, const RowBlock& block, const TensorView& tensor, int columns, int padded,
                         float* to) {
  for (int v = 0; v < block.vectors; ++v) {
    for (int pair = 0; pair < padded / 2; pair += vector_lanes) {
      Vec square[vector_lanes];
      for (int lane = 0; lane < vector_lanes; ++lane) {
        const auto* row = reinterpret_cast<const float*>(block.row(call, tensor, v * vector_lanes + lane));
        square[lane] = load_some<Float32>(row + pair, larger(columns / 2 - pair, 0));
      }
      transpose(square);
      for (int p = 0; p < vector_lanes; ++p) store(to + ((pair + p) * block.vectors + v) * vector_lanes, square[p]);
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
