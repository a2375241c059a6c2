#pragma once

// Products over rows of which some are hidden or dropped. The score of such a row has weight 0, but 0 * NaN is NaN. So
// a row that holds Inf or NaN must be multiplied only if its weight is not 0. Such rows are rare: the product runs over
// a copy in which they are cleared, and they are added one by one.

#include "cpu/tile/lanes.h"
#include "cpu/tile/multiply.h"
#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

struct SafeRows {
  FloatRows rows;  // without Inf and NaN
  FloatRows original;
  int nonfinite[block_kv];  // rows that were cleared
  int num_nonfinite = 0;
};

/// Whether rows of T hold neither Inf nor NaN. Then 0 times any of them is 0.
template <class T>
inline bool are_finite(const typename T::Stored* rows, std::int64_t stride, int count, int columns) {
  constexpr int chains = 4;  // sums that do not depend on each other
  Vec zero[chains] = {};
  for (int j = 0; j < count; j += chains) {
    const typename T::Stored* row[chains];
    FLASH_ATTENTION_UNROLL
    for (int i = 0; i < chains; ++i) row[i] = rows + smaller(j + i, count - 1) * stride;
    for (int c = 0; c < columns; c += vector_lanes) {
      FLASH_ATTENTION_UNROLL
      for (int i = 0; i < chains; ++i) zero[i] += load_some<T>(row[i] + c, columns - c) * 0.0f;
    }
  }
  return sum_lanes((zero[0] + zero[1]) + (zero[2] + zero[3])) == 0.0f;
}

/// count <= block_kv rows; buffer has room for them.
inline SafeRows make_safe(FloatRows rows, int count, int columns, bool weighted, float* buffer) {
  SafeRows safe{.rows = rows, .original = rows, .nonfinite = {}};
  if (weighted || are_finite<Float32>(rows.data, rows.stride, count, columns)) return safe;
  for (int j = 0; j < count; ++j) {
    if (!are_finite<Float32>(rows.data + j * rows.stride, rows.stride, 1, columns))
      safe.nonfinite[safe.num_nonfinite++] = j;
  }
  const int stride = round_up(columns, vector_lanes);
  int cleared = 0;
  for (int j = 0; j < count; ++j) {
    const bool clear = cleared < safe.num_nonfinite && safe.nonfinite[cleared] == j;
    if (clear) ++cleared;
    copy_row<Float32>(rows.data + j * rows.stride, clear ? 0 : columns, buffer + j * stride, stride);
  }
  safe.rows = {buffer, stride};
  return safe;
}

/// Weights w(row, target) and sums C(target, column), each at data[first * step + second * other step].
struct Strided {
  std::int64_t first, second;
};

/// C(target, column) += w(row, target) * row[column] over the cleared rows, where w is not 0.
inline void add_nonfinite_rows(const SafeRows& safe, const float* weights, Strided weight, int targets, float* C,
                               Strided sum, int columns) {
  for (int i = 0; i < safe.num_nonfinite; ++i) {
    const int row = safe.nonfinite[i];
    const float* values = safe.original.data + row * safe.original.stride;
    for (int target = 0; target < targets; ++target) {
      const float w = weights[row * weight.first + target * weight.second];
      if (w == 0.0f) continue;
      for (int c = 0; c < columns; ++c) C[target * sum.first + c * sum.second] += w * values[c];
    }
  }
}

/// Ct[column][lane] (+)= sum over the keys of a tile of rows[key][column] * W[key][lane].
template <Start start>
inline void add_to_lanes(const RowBlock& block, const Tile& tile, FloatRows rows, int columns, const float* W, float* Ct,
                         float* buffer, const float* factor = nullptr) {
  const SafeRows safe = make_safe(rows, tile.count, columns, tile.weighted, buffer);
  const auto add = [&](int v, int vectors, int first, int count) {
    const int lane = v * vector_lanes;
    multiply<start, Order::column_major>({.A = safe.rows.data + first * safe.rows.stride,
                                          .a_stride = safe.rows.stride,
                                          .B = W + first * block.lanes() + lane,
                                          .b_stride = block.lanes(),
                                          .C = Ct + lane,
                                          .c_stride = block.lanes(),
                                          .rows = columns,
                                          .depth = count,
                                          .vectors = vectors,
                                          .factor = factor == nullptr ? nullptr : factor + lane});
  };
  if (apart_by_vectors(block, tile)) {
    for (int v = 0, next; v < block.vectors; v = next) {
      const KeyRange keys = tile.seen_by[v];
      for (next = v + 1; next < block.vectors && tile.seen_by[next] == keys;) ++next;
      add(v, next - v, keys.first, keys.count());
    }
  } else {
    add(0, block.vectors, 0, tile.count);
  }
  add_nonfinite_rows(safe, W, {block.lanes(), 1}, block.lanes(), Ct, {1, block.lanes()}, columns);
}

}  // namespace
}  // namespace flash_attention::cpu
