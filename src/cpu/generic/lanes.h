#pragma once

// Between rows in memory and lanes in vectors.

#include "cpu/generic/rows.h"
#include "cpu/generic/transpose.h"

namespace flash_attention::cpu {
namespace {

/// to[column][lane] = factor * row_of(lane)[column] for the columns [0, columns). row_of gives a const T::Stored*.
template <class T, class RowOf>
inline void gather_lanes(RowOf row_of, int vectors, int columns, float factor, float* to) {
  for (int v = 0; v < vectors; ++v) {
    const typename T::Stored* rows[vector_lanes];
    for (int lane = 0; lane < vector_lanes; ++lane) rows[lane] = row_of(v * vector_lanes + lane);
    for (int column = 0; column < columns; column += vector_lanes) {
      const int count = smaller(columns - column, vector_lanes);
      Vec square[vector_lanes];
      for (int lane = 0; lane < vector_lanes; ++lane) square[lane] = load_some<T>(rows[lane] + column, count);
      transpose(square);
      for (int c = 0; c < count; ++c)
        store(to + (column + c) * vectors * vector_lanes + v * vector_lanes, square[c] * factor);
    }
  }
}

/// row_of(lane)[column] = factor[lane] * from[column][lane] for the lanes [0, rows). row_of gives a T::Stored*.
template <class T, class RowOf>
inline void scatter_lanes(const float* from, int vectors, int rows, int columns, const float* factor, RowOf row_of) {
  for (int v = 0; v < vectors; ++v) {
    const int lanes = smaller(rows - v * vector_lanes, vector_lanes);
    for (int column = 0; column < columns; column += vector_lanes) {
      const int count = smaller(columns - column, vector_lanes);
      Vec square[vector_lanes] = {};
      for (int c = 0; c < count; ++c) {
        square[c] = load(from + (column + c) * vectors * vector_lanes + v * vector_lanes) * load(factor + v * vector_lanes);
      }
      transpose(square);
      for (int lane = 0; lane < lanes; ++lane) {
        store_some<T>(row_of(v * vector_lanes + lane) + column, square[lane], count);
      }
    }
  }
}

/// A query-side tensor of the block, into lanes.
inline void gather_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns, float factor,
                        float* to) {
  with_element(call.element, [&](auto type) {
    using T = decltype(type);
    const auto row_of = [&](int lane) {
      return reinterpret_cast<const typename T::Stored*>(block.row(call, tensor, lane));
    };
    gather_lanes<T>(row_of, block.vectors, columns, factor, to);
  });
}

/// Out of lanes, into a query-side tensor of the block.
inline void scatter_rows(const Call& call, const RowBlock& block, const float* from, int columns, const float* factor,
                         const TensorView& tensor) {
  with_element(call.element, [&](auto type) {
    using T = decltype(type);
    const auto row_of = [&](int lane) { return reinterpret_cast<typename T::Stored*>(block.row(call, tensor, lane)); };
    scatter_lanes<T>(from, block.vectors, block.rows, columns, factor, row_of);
  });
}

/// Rows of float, one after the other; padded with 0 to `stride` columns.
template <class T>
inline void copy_row(const typename T::Stored* from, int columns, float* to, int stride) {
  for (int c = 0; c < stride; c += vector_lanes) store(to + c, load_some<T>(from + c, larger(columns - c, 0)));
}

struct FloatRows {
  const float* data;
  std::int64_t stride;
};

/// Rows [begin, begin + count) of the block's key head as float: where they lie, if they are float already and (for whole
/// vectors) need no padding, else converted into the buffer.
inline FloatRows key_rows(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t begin, int count,
                          int columns, bool whole_vectors, float* buffer) {
  const char* first = block.keys(call, tensor) + begin * tensor.seq_stride * size_of(call.element);
  if (call.element == Element::float32 && (!whole_vectors || columns % vector_lanes == 0)) {
    return {reinterpret_cast<const float*>(first), tensor.seq_stride};
  }
  const int stride = round_up(columns, vector_lanes);
  with_element(call.element, [&](auto type) {
    using T = decltype(type);
    const auto* rows = reinterpret_cast<const typename T::Stored*>(first);
    for (int j = 0; j < count; ++j) copy_row<T>(rows + j * tensor.seq_stride, columns, buffer + j * stride, stride);
  });
  return {buffer, stride};
}

}  // namespace
}  // namespace flash_attention::cpu
