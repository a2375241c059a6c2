#pragma once

// The products of pairs.h with an instruction that multiplies pairs lane by lane (dot_pairs): the register tile of
// multiply.h, and the dots of decode.h.

#include "cpu/decode/decode.h"
#include "cpu/tile/pairs.h"

namespace flash_attention::cpu {
namespace {

struct DotProducts {
  static constexpr int row_unit = tile_rows;
  static constexpr int depth_unit = 2;
  static void begin() {}
  static void end() {}
  static FLASH_ATTENTION_INLINE Short round(Vec x) { return round_to_bfloat16(x); }
  static FLASH_ATTENTION_INLINE Vec pair(Vec low, Vec high) { return round_to_pair(low, high); }

  struct Pair {
    using Left __attribute__((may_alias, aligned(2))) = float;
    using Stored = float;
    static FLASH_ATTENTION_INLINE Vec load(const float* from) { return cpu::load(from); }
    static FLASH_ATTENTION_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) { return dot_pairs(sum, a, b); }
  };

  template <Start start>
  static void multiply(const PairProduct& product) {
    cpu::multiply<start, Order::row_major, Pair>({.A = reinterpret_cast<const Pair::Left*>(product.A),
                                                  .a_stride = product.a_stride / 2,
                                                  .B = product.B,
                                                  .b_stride = product.b_stride,
                                                  .C = product.C,
                                                  .c_stride = product.c_stride,
                                                  .rows = product.rows,
                                                  .depth = product.depth / 2,
                                                  .vectors = product.lanes / vector_lanes});
  }
};

/// Dots of bfloat16 rows: pairs of columns are multiplied with the query in place, and pairs of keys, rounded, with the
/// values.
struct PairDots {
  using Keys = Bfloat16;
  static constexpr int columns = 2 * vector_lanes, vectors = 1, max_rows = 8;
  static constexpr bool any_width = false, raw_query = true;
  static const float* query(const DecodeHead& head) { return head.Q_raw; }
  static FLASH_ATTENTION_INLINE Vec load_pairs(const Half* from) { return *reinterpret_cast<const VecInMemory*>(from); }
  static FLASH_ATTENTION_INLINE void load_row(const Half* from, Vec (&to)[1]) { to[0] = load_pairs(from); }
  static FLASH_ATTENTION_INLINE Vec add(Vec sum, Vec key, Vec query) { return dot_pairs(sum, key, query); }
  static void copy_query(const Call& call, const char* row, float* to) {
    copy_words(reinterpret_cast<const Half*>(row), call.head_dim, to);
  }
  static void copy_words(const Half* from, int head_dim, float* to) {
    for (int c = 0; c < head_dim; c += vector_lanes) {
      store(reinterpret_cast<Half*>(to) + c, load_halves(from + c, head_dim - c));
    }
  }

  /// Stores each row's probabilities as halves, at the beginning of the row.
  static void prepare_weights(int rows, int keys, float* P) {
    for (int row = 0; row < rows; ++row, P += block_kv) {
      for (int key = 0; key < keys; key += vector_lanes) {
        store(reinterpret_cast<Half*>(P) + key, round_to_bfloat16(load(P + key)));
      }
    }
  }

  static const float* weights_at(const float* P, int key) { return P + key / 2; }

  static void add_values(int rows, const float* P, KeyRows<Bfloat16> V, int keys, float* O, int width) {
    int column = 0;
    for (; column + 64 <= width; column += 64) {
      add_columns<4>(rows, P, keys, O + column, width, Interleaved{V.data + column, V.stride});
    }
    for (; column < width; column += 32) {
      add_columns<2>(rows, P, keys, O + column, width, Interleaved{V.data + column, V.stride});
    }
  }

 protected:
  /// Words of a pair of keys of bfloat16.
  struct Interleaved {
    const Half* data;
    std::int64_t stride;
    template <int vectors_>
    FLASH_ATTENTION_INLINE void load(int key, bool both, Vec (&pairs)[vectors_]) const {
      const Half* row = data + key * stride;
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < vectors_; v += 2) {
        const Vec even = load_pairs(row + v * vector_lanes);
        const Vec odd = both ? load_pairs(row + stride + v * vector_lanes) : Vec{};
        interleave_rows(even, odd, pairs[v], pairs[v + 1]);
      }
    }
  };

  /// `strip` vectors of all rows of O.
  template <int strip, class Values>
  static void add_columns(int rows, const float* P, int keys, float* O, int width, Values values) {
    for (int row = 0; row < rows;) {
      const int left = rows - row;
      const float* words = P + row * block_kv;
      float* sums = O + row * width;
      if (left == 1) {
        add_strip<1, strip>(words, values, keys, sums, width);
      } else if (left < 4) {
        add_strip<2, strip>(words, values, keys, sums, width);
      } else {
        add_strip<4, strip>(words, values, keys, sums, width);
      }
      row += left == 1 ? 1 : left < 4 ? 2 : 4;
    }
  }

 private:
  template <int rows, int strip, class Values>
  static void add_strip(const float* P, Values values, int keys, float* O, int width) {
    Vec sum[rows][strip];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < strip; ++v) sum[r][v] = load(O + r * width + v * vector_lanes);
    }
    for (int key = 0; key < keys; key += 2, ++P) {
      Vec pairs[strip];
      values.load(key, key + 1 < keys, pairs);
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) {
        const Vec weights = splat(P[r * block_kv]);
        FLASH_ATTENTION_UNROLL
        for (int v = 0; v < strip; ++v) sum[r][v] = dot_pairs(sum[r][v], weights, pairs[v]);
      }
    }
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < strip; ++v) store(O + r * width + v * vector_lanes, sum[r][v]);
    }
  }
};

}  // namespace
}  // namespace flash_attention::cpu
