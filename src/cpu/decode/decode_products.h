#pragma once

// The two products of decode.h over a tile of keys of one key head: scores, and sums of values. `Dots` is how rows of a
// type are multiplied: FloatDots, or a type for an instruction set with products of pairs (dot_products.h).

#include "cpu/tile/prefetch.h"
#include "cpu/tile/softmax.h"

namespace flash_attention::cpu {
namespace {

/// The data of a key head in decode.
struct DecodeHead {
  float* Q;      // [rows][columns]; groups of 8 rows are packed as in eight_rows.h
  float* Q_raw;  // the same in the tensor's type, if Dots needs it
  float* O;      // [rows][columns_v]
  Statistics statistics;
};

/// Calls visit.operator()<count>(row) for groups of `most` rows, then of half as many and so on, which together are the
/// rows [row, rows).
template <int most, class Visit>
FLASH_ATTENTION_INLINE void for_row_groups(int rows, Visit visit, int row = 0) {
  for (; row + most <= rows; row += most) visit.template operator()<most>(row);
  if constexpr (most > 1) for_row_groups<most / 2>(rows, visit, row);
}

/// Rows of keys in memory.
template <class T>
struct KeyRows {
  const typename T::Stored* data;
  std::int64_t stride;
};

/// Dots for rows of T that are converted to float.
template <class T>
struct FloatDots {
  using Keys = T;                               // of K and V
  static constexpr int columns = vector_lanes;  // columns of a row that are loaded together
  static constexpr bool any_width = true;       // head_dim need not be a multiple of that
  static constexpr int vectors = 1;             // vectors that these columns become
  static constexpr int max_rows = 8;            // of a group
  static constexpr bool raw_query = false;      // Q in the tensor's type
  static const float* query(const DecodeHead& head) { return head.Q; }
  static FLASH_ATTENTION_INLINE void load_row(const typename T::Stored* from, Vec (&to)[1]) { to[0] = T::load(from); }
  static FLASH_ATTENTION_INLINE Vec load_end(const typename T::Stored* from, int count) {
    return load_some<T>(from, count);
  }
  static FLASH_ATTENTION_INLINE Vec add(Vec sum, Vec key, Vec query) { return sum + key * query; }

  /// A row of Q, of any type.
  static void copy_query(const Call& call, const char* row, float* to) {
    with_element(call.dtype, [&](auto type) {
      using Q = decltype(type);
      copy_row<Q>(reinterpret_cast<const typename Q::Stored*>(row), call.head_dim, to,
                  round_up(call.head_dim, vector_lanes));
    });
  }

  static void copy_words(const typename T::Stored* from, int head_dim, float* to) {
    copy_row<T>(from, head_dim, to, round_up(head_dim, vector_lanes));
  }

  static void prepare_weights(int /*rows*/, int /*keys*/, float* /*P*/) {}

  /// The address of the weights of a key, in rows that begin at P.
  static const float* weights_at(const float* P, int key) { return P + key; }

  /// O[row] += sum of P[row][key] * V[key]. O has rows of whole vectors.
  static void add_values(int rows, const float* P, KeyRows<T> V, int keys, float* O, int head_dim) {
    const int width = round_up(head_dim, vector_lanes), whole = head_dim / vector_lanes;
    multiply<Start::add, Order::row_major, T>({.A = P,
                                               .a_stride = block_kv,
                                               .B = V.data,
                                               .b_stride = V.stride,
                                               .C = O,
                                               .c_stride = width,
                                               .rows = rows,
                                               .depth = keys,
                                               .vectors = whole});
    const int at = whole * vector_lanes;
    if (at == head_dim) return;
    V.data += at;
    for_row_groups<4>(rows, [&]<int group>(int row) {
      add_ends<group>(P + row * block_kv, V, keys, O + row * width + at, width, head_dim - at);
    });
  }

 private:
  /// Adds the columns after the last whole vector: for some rows, or for one row in sums that do not depend on each
  /// other.
  template <int rows>
  static void add_ends(const float* P, KeyRows<T> V, int keys, float* O, int width, int columns) {
    Vec sum[4] = {};
    for (int key = 0; key < keys; ++key, V.data += V.stride) {
      const Vec values = load_end(V.data, columns);
      if constexpr (rows == 1) {
        sum[0] = sum[1] + values * P[key];
        sum[1] = sum[2], sum[2] = sum[3], sum[3] = sum[0];
      } else {
        FLASH_ATTENTION_UNROLL
        for (int r = 0; r < rows; ++r) sum[r] += values * P[r * block_kv + key];
      }
    }
    if constexpr (rows == 1) sum[0] = sum[1] + sum[2] + sum[3];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) store(O + r * width, load(O + r * width) + sum[r]);
  }
};

/// 32-bit words of a row of Q.
template <class Dots>
constexpr int words_of(int head_dim) {
  return round_up(head_dim, Dots::columns) / Dots::columns * Dots::vectors * vector_lanes;
}

/// S[r][j] = factor * dot(K[j], Q[r]) for r < rows, and for as many keys as make a vector of sums. Rows of Q are whole
/// vectors, with 0 after head_dim.
template <int rows, class Dots>
FLASH_ATTENTION_INLINE void dot_square(KeyRows<typename Dots::Keys> K, const float* Q, int head_dim, float factor,
                                       float* S) {
  using Stored = typename Dots::Keys::Stored;
  constexpr int step = vector_lanes / rows, run = smaller(step, 4);
  const int q_stride = words_of<Dots>(head_dim);
  const Stored* first[step / run];  // of every fourth row: registers for all rows would be too many
  FLASH_ATTENTION_UNROLL
  for (int i = 0; i < step / run; ++i) first[i] = K.data + i * run * K.stride;
  Vec sum[vector_lanes] = {};
  const auto add_columns = [&](auto load_row) {
    Vec q[rows][Dots::vectors];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < Dots::vectors; ++v) q[r][v] = load(Q + r * q_stride + v * vector_lanes);
    }
    FLASH_ATTENTION_UNROLL
    for (int j = 0; j < step; ++j) {
      Vec values[Dots::vectors];
      load_row(first[j / run] + j % run * K.stride, values);
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) {
        FLASH_ATTENTION_UNROLL
        for (int v = 0; v < Dots::vectors; ++v) sum[r * step + j] = Dots::add(sum[r * step + j], values[v], q[r][v]);
      }
    }
  };
  int column = 0;
  for (; column + Dots::columns <= head_dim; column += Dots::columns, Q += Dots::vectors * vector_lanes) {
    add_columns([](const Stored* from, Vec(&to)[Dots::vectors]) { Dots::load_row(from, to); });
    FLASH_ATTENTION_UNROLL
    for (int i = 0; i < step / run; ++i) first[i] += Dots::columns;
  }
  if constexpr (Dots::any_width) {
    const int left = head_dim - column;
    if (left > 0) add_columns([&](const Stored* from, Vec(&to)[1]) { to[0] = Dots::load_end(from, left); });
  }
  alignas(64) float dots[vector_lanes];
  store(dots, reduce_each<Sum>(sum) * factor);
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) __builtin_memcpy(S + r * block_kv, dots + r * step, step * sizeof(float));
}

/// The same for a few keys, one by one.
template <int rows, class Dots>
inline void dot_few(KeyRows<typename Dots::Keys> K, int keys, const float* Q, int head_dim, float factor, float* S) {
  const int q_stride = words_of<Dots>(head_dim);
  for (int key = 0; key < keys; ++key) {
    Vec sum[rows] = {};
    const auto add_columns = [&](int word, const Vec(&values)[Dots::vectors]) {
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) {
        FLASH_ATTENTION_UNROLL
        for (int v = 0; v < Dots::vectors; ++v)
          sum[r] = Dots::add(sum[r], values[v], load(Q + r * q_stride + word + v * vector_lanes));
      }
    };
    const auto* row = K.data + key * K.stride;
    Vec values[Dots::vectors];
    int column = 0, word = 0;
    for (; column + Dots::columns <= head_dim; column += Dots::columns, word += Dots::vectors * vector_lanes) {
      Dots::load_row(row + column, values);
      add_columns(word, values);
    }
    if constexpr (Dots::any_width) {
      if (column < head_dim) {
        values[0] = Dots::load_end(row + column, head_dim - column);
        add_columns(word, values);
      }
    }
    for (int r = 0; r < rows; ++r) S[r * block_kv + key] = sum_lanes(sum[r]) * factor;
  }
}

/// All keys of a tile. The last square ends with the last key, so it computes some keys again.
template <int rows, class Dots>
inline void dot_tile(KeyRows<typename Dots::Keys> K, int keys, const float* Q, int head_dim, float factor, float* S,
                     NextTile& next) {
  constexpr int step = vector_lanes / rows;
  if (keys < step) return dot_few<rows, Dots>(K, keys, Q, head_dim, factor, S);
  for (int key = 0; key < keys; key += step) {
    const int first = smaller(key, keys - step);
    next.prefetch_keys();
    dot_square<rows, Dots>({K.data + first * K.stride, K.stride}, Q, head_dim, factor, S + first);
  }
}

/// All rows, in groups.
template <class Dots>
inline void dot_rows(int rows, KeyRows<typename Dots::Keys> K, int keys, const float* Q, int head_dim, float factor,
                     float* S, NextTile& next) {
  const int q_stride = words_of<Dots>(head_dim);
  for_row_groups<4>(rows, [&]<int group>(int row) {
    dot_tile<group, Dots>(K, keys, Q + row * q_stride, head_dim, factor, S + row * block_kv, next);
  });
}

}  // namespace
}  // namespace flash_attention::cpu
