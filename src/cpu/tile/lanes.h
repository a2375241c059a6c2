#pragma once

// Transfers between rows in memory and lanes in vectors.

#include "cpu/tile/narrow.h"
#include "cpu/tile/rows.h"
#include "cpu/tile/transpose.h"

namespace flash_attention::cpu {
namespace {

/// to[column][lane] = factor * row_of(lane)[column] for the columns [0, columns). row_of gives a const T::Stored*.
template <class T, class RowOf>
inline void gather_lanes(RowOf row_of, int vectors, int columns, float factor, float* to) {
  const int stride = vectors * vector_lanes;
  for (int v = 0; v < vectors; ++v, to += vector_lanes) {
    const typename T::Stored* rows[vector_lanes];
    for (int lane = 0; lane < vector_lanes; ++lane) rows[lane] = row_of(v * vector_lanes + lane);
    Vec square[vector_lanes];
    int column = 0;
    for (; column + vector_lanes <= columns; column += vector_lanes) {
      FLASH_ATTENTION_UNROLL
      for (int lane = 0; lane < vector_lanes; ++lane) square[lane] = T::load(rows[lane] + column) * factor;
      transpose(square);
      FLASH_ATTENTION_UNROLL
      for (int c = 0; c < vector_lanes; ++c) store(to + (column + c) * stride, square[c]);
    }
    if (column == columns) continue;
    for (int lane = 0; lane < vector_lanes; ++lane)
      square[lane] = load_some<T>(rows[lane] + column, columns - column) * factor;
    transpose(square);
    for (int c = 0; c < columns - column; ++c) store(to + (column + c) * stride, square[c]);
  }
}

/// to[lane][column] = scale[lane] * from[column][lane] for the lanes [0, lanes) of a vector.
template <class T>
inline void scatter_vector(const float* from, int stride, int lanes, int columns, Vec scale,
                           typename T::Stored* const* to) {
  Vec square[vector_lanes];
  int column = 0;
  for (; column + vector_lanes <= columns && lanes == vector_lanes; column += vector_lanes) {
    FLASH_ATTENTION_UNROLL
    for (int c = 0; c < vector_lanes; ++c) square[c] = load(from + (column + c) * stride) * scale;
    transpose(square);
    FLASH_ATTENTION_UNROLL
    for (int lane = 0; lane < vector_lanes; ++lane) store(to[lane] + column, T::from_float(square[lane]));
  }
  for (; column < columns; column += vector_lanes) {
    const int count = smaller(columns - column, vector_lanes);
    for (int c = 0; c < count; ++c) square[c] = load(from + (column + c) * stride) * scale;
    for (int c = count; c < vector_lanes; ++c) square[c] = Vec{};
    transpose(square);
    for (int lane = 0; lane < lanes; ++lane) store_some<T>(to[lane] + column, square[lane], count);
  }
}

/// row_of(lane)[column] = factor[lane] * from[column][lane] for the lanes [0, rows). row_of gives a T::Stored*.
template <class T, class RowOf>
inline void scatter_lanes(const float* from, int vectors, int rows, int columns, const float* factor, RowOf row_of) {
  for (int first = 0; first < rows; first += vector_lanes) {
    const int lanes = smaller(rows - first, vector_lanes);
    typename T::Stored* to[vector_lanes];
    for (int lane = 0; lane < lanes; ++lane) to[lane] = row_of(first + lane);
    scatter_vector<T>(from + first, vectors * vector_lanes, lanes, columns, load(factor + first), to);
  }
}

/// Loads a query-side tensor of the block into lanes.
inline void gather_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns, float factor,
                        float* to) {
  with_element(call.dtype, [&](auto type) {
    using T = decltype(type);
    const auto row_of = [&](int lane) {
      return reinterpret_cast<const typename T::Stored*>(block.row(call, tensor, lane));
    };
    gather_lanes<T>(row_of, block.vectors, columns, factor, to);
  });
}

/// Loads Q of the block into lanes. If it has 8 bits, it goes through a buffer of floats and is multiplied by its
/// scale.
inline void gather_queries(const Call& call, const RowBlock& block, float factor, float* buffer, float* to) {
  if (!is_narrow(call.q_dtype)) return gather_rows(call, block, call.q, call.head_dim, factor, to);
  for (int lane = 0; lane < block.lanes(); ++lane) {
    const char* row = call.q.data + block.row_offset(call.q, lane);
    convert_codes<Float32>(call.q_dtype, reinterpret_cast<const std::uint8_t*>(row), call.head_dim,
                           buffer + lane * call.head_dim);
  }
  const ScaleView& scales = call.q_scale;
  if (scales.data != nullptr) {
    factor *= scales.data[block.batch * scales.batch_stride + block.kv_head * scales.head_stride];
  }
  const auto row_of = [&](int lane) { return buffer + lane * call.head_dim; };
  gather_lanes<Float32>(row_of, block.vectors, call.head_dim, factor, to);
}

/// Stores lanes to a query-side tensor of the block.
inline void scatter_rows(const Call& call, const RowBlock& block, const float* from, int columns, const float* factor,
                         const TensorView& tensor) {
  with_element(call.dtype, [&](auto type) {
    using T = decltype(type);
    const auto row_of = [&](int lane) { return reinterpret_cast<typename T::Stored*>(block.row(call, tensor, lane)); };
    scatter_lanes<T>(from, block.vectors, block.rows, columns, factor, row_of);
  });
}

/// Copies a row as float, padded with 0 to `stride` columns.
template <class T>
inline void copy_row(const typename T::Stored* from, int columns, float* to, int stride) {
  int c = 0;
  for (; c + vector_lanes <= columns; c += vector_lanes) store(to + c, T::load(from + c));
  if (c < columns) store(to + c, load_some<T>(from + c, columns - c)), c += vector_lanes;
  for (; c < stride; c += vector_lanes) store(to + c, Vec{});
}

struct FloatRows {
  const float* data;
  std::int64_t stride;
};

/// Rows [begin, begin + count) of the block's key head as float. They are used in place if they are float, adjacent,
/// and (for whole vectors) need no padding. Otherwise they are converted into the buffer.
inline FloatRows key_rows(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t begin, int count,
                          int columns, bool whole_vectors, float* buffer) {
  const bool as_they_lie = call.kv_dtype == Dtype::float32 && block.keys_together(call, begin) >= count;
  if (as_they_lie && (!whole_vectors || columns % vector_lanes == 0)) {
    return {reinterpret_cast<const float*>(block.key_row(call, tensor, begin)), tensor.seq_stride};
  }
  const int stride = round_up(columns, vector_lanes);
  if (is_narrow(call.kv_dtype)) {
    copy_scaled_codes(call, block, tensor, begin, count, columns, buffer, stride);
    return {buffer, stride};
  }
  with_element(call.kv_dtype, [&](auto type) {
    using T = decltype(type);
    for (int j = 0; j < count; ++j) {
      const auto* row = reinterpret_cast<const typename T::Stored*>(block.key_row(call, tensor, begin + j));
      copy_row<T>(row, columns, buffer + j * stride, stride);
    }
  });
  return {buffer, stride};
}

/// Latent keys: each is its value, given here as float, followed by columns of k.
inline FloatRows latent_key_rows(const Call& call, const RowBlock& block, FloatRows V, std::int64_t begin, int count,
                                 float* buffer, float* spare) {
  const int stride = round_up(call.head_dim, vector_lanes);
  const FloatRows own = key_rows(call, block, call.k, begin, count, call.key_columns(), false, spare);
  for (int j = 0; j < count; ++j) {
    float* to = buffer + j * stride;
    for (int c = 0; c < call.head_dim_v; ++c) to[c] = V.data[j * V.stride + c];
    for (int c = call.head_dim_v; c < call.head_dim; ++c) to[c] = own.data[j * own.stride + c - call.head_dim_v];
    for (int c = call.head_dim; c < stride; ++c) to[c] = 0;
  }
  return {buffer, stride};
}

constexpr int copied_rows = 64;  // by one item of the first step

inline std::int64_t copy_items(const Call& call) {
  if (call.k_source.data == nullptr) return 0;
  const bool packed = call.cu_seqlens_kv != nullptr;
  return (packed ? 1 : call.batch) * call.heads_kv * ceil_div(packed ? call.total_kv : call.seq_kv, copied_rows);
}

/// Copies some rows of K and V of a key head as float, if they are far apart or not float. Otherwise they would be
/// converted once for each block of queries.
inline void copy_keys(const Call& call, std::int64_t item, void* /*scratch*/) {
  const std::int64_t rows = call.cu_seqlens_kv != nullptr ? call.total_kv : call.seq_kv;
  const std::int64_t chunks = ceil_div(rows, copied_rows), first = item % chunks * copied_rows;
  const std::int64_t kv_head = item / chunks % call.heads_kv, batch = item / chunks / call.heads_kv;
  const std::int64_t last = smaller(first + copied_rows, rows);
  const auto copy = [&](const TensorView& from, const TensorView& to, int columns) {
    const auto offset = [&](const TensorView& tensor, std::int64_t row) {
      return batch * tensor.batch_stride + kv_head * tensor.head_stride + row * tensor.seq_stride;
    };
    with_element(call.dtype, [&](auto type) {
      using T = decltype(type);
      for (std::int64_t row = first; row < last; ++row) {
        copy_row<T>(reinterpret_cast<const typename T::Stored*>(from.data) + offset(from, row), columns,
                    reinterpret_cast<float*>(to.data) + offset(to, row), round_up(columns, vector_lanes));
      }
    });
  };
  copy(call.k_source, call.k, call.head_dim);
  copy(call.v_source, call.v, call.head_dim_v);
}

}  // namespace
}  // namespace flash_attention::cpu
