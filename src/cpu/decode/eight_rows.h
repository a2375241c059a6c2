#pragma once

// Scores of eight query rows at a time, used by decode.h from eight rows on. A vector of Q holds four columns of some
// rows. The same four columns of a key are loaded into all quarters of a vector, so a vector of sums is added up over
// four lanes only. (A square of decode_products.h adds over all lanes, which costs as much as its products.)
//
//     Q[column / 4][row][column % 4], a vector is vector_lanes / 4 rows       packed once
//     sum[row][column % 4] += K[key][column] * Q                              for some keys at once

#include "cpu/decode/decode_products.h"

namespace flash_attention::cpu {
namespace {

constexpr int quad_vectors = 8 / (vector_lanes / 4);                                 // for four columns of the rows
constexpr int quad_keys = (tile_rows * tile_vectors >= 16 ? 16 : 8) / quad_vectors;  // at once: sums in registers

/// Packs eight rows of `stride` words, 32 bits each.
inline void pack_eight_rows(const float* rows, int stride, float* to) {
  for (int column = 0; column < stride; column += 4) {
    for (int row = 0; row < 8; ++row, to += 4) __builtin_memcpy(to, rows + row * stride + column, 4 * sizeof(float));
  }
}

/// S[row][key] = factor * (the sum of each four lanes of sum[key]), for the rows of a vector and up to four keys.
template <int keys>
FLASH_ATTENTION_INLINE void store_quads(Vec (&sum)[keys], float factor, float* S) {
  alignas(64) float dots[vector_lanes];
  store(dots, reduce_each<Sum, 4>(sum) * factor);
  FLASH_ATTENTION_UNROLL
  for (int row = 0; row < vector_lanes / 4; ++row)
    __builtin_memcpy(S + row * block_kv, dots + 4 * row, keys * sizeof(float));
}

/// quad_keys keys, rows of `words` words.
template <class Dots>
FLASH_ATTENTION_INLINE void dot_quads(FloatRows K, int words, const float* Q, float factor, float* S) {
  constexpr int run = smaller(quad_keys, 4);
  Vec sum[quad_vectors][quad_keys / run][run] = {};
  for (int column = 0; column < words; column += 4, Q += quad_vectors * vector_lanes) {
    FLASH_ATTENTION_UNROLL
    for (int j = 0; j < quad_keys; ++j) {
      const Vec key = load_quad(K.data + j * K.stride + column);
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < quad_vectors; ++v) {
        Vec& to = sum[v][j / run][j % run];
        to = Dots::add(to, key, load(Q + v * vector_lanes));
      }
    }
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < quad_vectors; ++v) {
    FLASH_ATTENTION_UNROLL
    for (int i = 0; i < quad_keys / run; ++i)
      store_quads(sum[v][i], factor, S + v * (vector_lanes / 4) * block_kv + i * run);
  }
}

/// All keys of a tile. Rows of K are used in place if their length in words is a multiple of four and they are whole
/// words apart. Otherwise they are copied.
template <class Dots>
inline void dot_eight_rows(KeyRows<typename Dots::Keys> K, int keys, const float* Q, int head_dim, float factor, float* S,
                           NextTile& next) {
  using Stored = typename Dots::Keys::Stored;
  constexpr int columns_of_word = Dots::columns / (Dots::vectors * vector_lanes);
  const int words = round_up(head_dim, Dots::columns) / columns_of_word;
  const bool in_place = sizeof(Stored) * columns_of_word == sizeof(float) && head_dim % (4 * columns_of_word) == 0 &&
                        K.stride % columns_of_word == 0;
  alignas(64) float copy[quad_keys * max_head_dim];
  for (int key = 0; key < keys; key += quad_keys) {
    const int first = larger(smaller(key, keys - quad_keys), 0);  // the last ones include some keys again
    const Stored* row = K.data + first * K.stride;
    FloatRows rows{reinterpret_cast<const float*>(row), K.stride / columns_of_word};
    if (!in_place || keys < quad_keys) {
      for (int j = 0; j < quad_keys; ++j)
        Dots::copy_words(row + smaller(j, keys - 1) * K.stride, head_dim, copy + j * words);
      rows = {copy, words};
    }
    for (int i = 0; i < 8 * quad_keys; i += vector_lanes) next.prefetch_keys();
    dot_quads<Dots>(rows, in_place ? head_dim / columns_of_word : words, Q, factor, S + first);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
