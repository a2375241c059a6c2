#pragma once

// Forward in bfloat16 for a single block of rows, which needs each tile of keys only once. Packing would be most of the
// work, so K is used in place, and two rows of V are interleaved instead of many transposed. The sums of values are in
// rows:
//     S = K Q^T, P                       bfloat16_scores.h, queries in lanes
//     O = O + P V                        P transposed, V in pairs of keys

#include "cpu/prefill/bfloat16_scores.h"
#include "cpu/tile/prefetch.h"

namespace flash_attention::cpu {
namespace {

/// Packs V of a tile in pairs of keys, [key / 2][columns] words, columns in multiples of 16. Prefetches the next tile.
inline void pack_value_pairs(const Call& call, const KeyTile& keys, int columns, ValueTile& to, NextTile& next) {
  LargestBits largest;
  for (int key = 0; key < keys.padded; key += 2) {
    const Half *even = keys.row(call.v, key), *odd = keys.row(call.v, key + 1);
    float* words = reinterpret_cast<float*>(to.values) + key / 2 * columns;
    for (int i = 0; i < 2; ++i) next.prefetch_keys(), next.prefetch_values();
    for (int c = 0; c < columns; c += vector_lanes) {
      const int left = call.head_dim_v - c;
      const Short low = load_halves(even + c, key < keys.count ? left : 0);
      const Short high = load_halves(odd + c, key + 1 < keys.count ? left : 0);
      largest.take(low), largest.take(high);
      store(words + c, interleave(low, high));
    }
  }
  to.any_nonfinite = !largest.all_finite();
  for (int key = 0; to.any_nonfinite && key < keys.padded; ++key) {
    LargestBits of_row;
    for (int c = 0; key < keys.count && c < columns; c += vector_lanes) {
      of_row.take(load_halves(keys.row(call.v, key) + c, call.head_dim_v - c));
    }
    to.nonfinite[key] = !of_row.all_finite();
    for (int c = 0; to.nonfinite[key] != 0 && c < columns; ++c) to.values[(key / 2 * columns + c) * 2 + key % 2] = 0;
  }
}

/// K of a tile: in place, if the products may read everything that they do and rows are whole words apart; otherwise a
/// copy.
template <class Products>
inline HalfRows keys_as_they_lie(const Call& call, const KeyTile& keys, int count, Half* copy) {
  const bool whole_words = call.head_dim % 32 == 0 && call.k.seq_stride % 2 == 0;
  if (whole_words && round_up(count, Products::row_unit) <= keys.count) {
    return {keys.row(call.k, 0), call.k.seq_stride};
  }
  const int columns = round_up(call.head_dim, 32);
  LargestBits unused;
  for (int key = 0; key < keys.padded; ++key) {
    copy_halves(keys.row(call.k, key), key < keys.count ? call.head_dim : 0, copy + key * columns, columns, unused);
  }
  return {copy, columns};
}

/// Transposes: to[lane][key / 2] = P[key / 2][lane]. Returns the number of words from row to row.
inline int weights_in_rows(const float* P, int lanes, int keys, float* to) {
  const int words = round_up(keys / 2, vector_lanes);
  for (int lane = 0; lane < lanes; lane += vector_lanes) {
    for (int word = 0; word < words; word += vector_lanes) {
      Vec square[vector_lanes];
      for (int i = 0; i < vector_lanes; ++i) square[i] = load(P + (word + i) * lanes + lane);
      transpose(square);
      for (int i = 0; i < vector_lanes; ++i) store(to + (lane + i) * words + word, square[i]);
    }
  }
  return words;
}

/// Processes one tile of keys.
template <class Products>
inline void attend_once(const Call& call, const RowBlock& block, const Tile& tile, Bfloat16Scratch& scratch) {
  const int columns = round_up(call.head_dim_v, 16), keys = round_up(tile.count, Products::depth_unit);
  const KeyTile key_tile(call, block.batch, block.kv_head, tile.begin / block_kv);
  NextTile next = next_tile(call, block, tile.begin + block_kv, exceeds_cache(call) ? tile.begin + 2 * block_kv : 0);
  pack_value_pairs(call, key_tile, columns, scratch.values, next);
  const HalfRows K = keys_as_they_lie<Products>(call, key_tile, tile.count, scratch.K);
  if (probabilities<Products>(call, block, tile, K, keys, scratch)) {
    for (int row = 0; row < block.rows; ++row) {
      float* sums = scratch.O + row * columns;
      for (int c = 0; c < columns; c += vector_lanes) store(sums + c, load(sums + c) * scratch.rescale[row]);
    }
  }
  const int words = weights_in_rows(scratch.P, block.lanes(), keys, scratch.S);
  Products::template multiply<Start::add>({.A = reinterpret_cast<const Half*>(scratch.S),
                                           .a_stride = 2 * words,
                                           .B = reinterpret_cast<const float*>(scratch.values.values),
                                           .b_stride = columns,
                                           .C = scratch.O,
                                           .c_stride = columns,
                                           .rows = round_up(block.rows, Products::row_unit),
                                           .depth = keys,
                                           .lanes = columns});
  if (scratch.values.any_nonfinite)
    add_nonfinite_keys(call, block, tile, scratch.values.nonfinite, keys, {columns, 1}, scratch);
}

}  // namespace
}  // namespace flash_attention::cpu
