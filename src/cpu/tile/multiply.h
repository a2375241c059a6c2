#pragma once

// The matrix product of all of attention: C[row][lane] (+)= sum over k of A(row, k) * B[k][lane]. The lanes of B and C
// are in vectors, and elements of A are broadcast. A register tile of C stays in registers for all of k. B may have any
// element type; A and C are float. (For an instruction that multiplies pairs, an element of A and of B is a pair.)
//
// Each step is one multiply-add, called by name. The compiler may contract C * factor + a * b in two ways, which differ
// in the last bit, so tiles of different shapes could disagree.

#include "cpu/tile/rows.h"

namespace flash_attention::cpu {
namespace {

enum class Start {
  zero,    // C = A B
  add,     // C += A B
  rescale  // C = C * factor[lane] + A B
};

/// The layout of A: element (row, k) is at A[row * stride + k], or at A[k * stride + row].
enum class Order { row_major, column_major };

template <class T = Float32>
struct Product {
  const typename T::Left* A;
  std::int64_t a_stride;
  const typename T::Stored* B;  // [depth][lanes]
  std::int64_t b_stride;
  float* C;  // [rows][lanes]
  std::int64_t c_stride;
  int rows;
  int depth;
  int vectors;                    // lanes / vector_lanes
  const float* factor = nullptr;  // Start::rescale: [lanes]
};

template <int rows, int vectors, Start start, Order order, class T>
void multiply_tile(const Product<T>& product, const typename T::Left* A, const typename T::Stored* B, float* C,
                   const float* factor) {
  const std::int64_t row_step = order == Order::row_major ? product.a_stride : 1;
  const std::int64_t k_step = order == Order::row_major ? 1 : product.a_stride;
  const std::int64_t b_stride = product.b_stride, c_stride = product.c_stride;
  Vec sum[rows][vectors];
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) {
      sum[r][v] = start == Start::zero ? Vec{} : load(C + r * c_stride + v * vector_lanes);
      if constexpr (start == Start::rescale) sum[r][v] *= load(factor + v * vector_lanes);
    }
  }
  for (int k = product.depth; k > 0; --k, A += k_step, B += b_stride) {
    Vec b[vectors];
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) b[v] = T::load(B + v * vector_lanes);
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      const Vec a = splat(A[r * row_step]);
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < vectors; ++v) sum[r][v] = T::multiply_add(sum[r][v], a, b[v]);
    }
  }
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < vectors; ++v) store(C + r * c_stride + v * vector_lanes, sum[r][v]);
  }
}

/// Rows [row, end) of a strip `vectors` wide, from lane `lane` on. A remainder of fewer than `rows` rows is not
/// processed.
template <int rows, int vectors, Start start, Order order, class T>
inline void multiply_strip(const Product<T>& product, int row, int end, int lane) {
  const std::int64_t row_step = order == Order::row_major ? product.a_stride : 1;
  for (; row + rows <= end; row += rows) {
    multiply_tile<rows, vectors, start, order>(product, product.A + row * row_step, product.B + lane,
                                               product.C + row * product.c_stride + lane,
                                               start == Start::rescale ? product.factor + lane : nullptr);
  }
}

/// A few rows in strips as wide as the registers allow, because narrow strips would wait for their sums. The remaining
/// rows are processed half as many at a time.
template <int rows, Start start, Order order, class T>
inline void multiply_few(const Product<T>& product, int row) {
  constexpr int room = tile_rows * tile_vectors / rows;
  constexpr int widest = room >= 8 ? 8 : room >= 4 ? 4 : 2;
  const int end = row + (product.rows - row) / rows * rows;
  int v = 0;
  const auto run = [&]<int vectors>() {
    for (; v + vectors <= product.vectors; v += vectors) {
      multiply_strip<rows, vectors, start, order>(product, row, end, v * vector_lanes);
    }
  };
  if (end > row) {
    if constexpr (widest >= 8) run.template operator()<8>();
    if constexpr (widest >= 4) run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
  }
  if constexpr (rows > 1) {
    if (end < product.rows) multiply_few<rows / 2, start, order>(product, end);
  }
}

template <Start start, Order order, class T>
inline void multiply_slab(const Product<T>& product) {
  const int tiled = product.rows / tile_rows * tile_rows;  // rows that make whole register tiles
  for (int v = 0; tiled > 0 && v < product.vectors;) {
    const int left = product.vectors - v;
    const int width = left == tile_vectors + 1 ? (left + 1) / 2 : left < tile_vectors ? left : tile_vectors;
    const int lane = v * vector_lanes;
    switch (width) {
      case 1:
        multiply_strip<tile_rows, 1, start, order>(product, 0, tiled, lane);
        break;
      case 2:
        multiply_strip<tile_rows, 2, start, order>(product, 0, tiled, lane);
        break;
      default:
        multiply_strip<tile_rows, tile_vectors, start, order>(product, 0, tiled, lane);
        break;
    }
    v += width;
  }
  if (tiled < product.rows) multiply_few<4, start, order>(product, tiled);
}

/// Processes slabs of B that stay in L1 for all rows.
template <Start start, Order order, class T = Float32>
inline void multiply(const Product<T>& product) {
  constexpr int deepest = 128;
  Product<T> slab = product;
  slab.depth = smaller(product.depth, deepest);
  multiply_slab<start, order>(slab);
  for (int k = deepest; k < product.depth; k += deepest) {
    slab.A += order == Order::row_major ? deepest : deepest * product.a_stride;
    slab.B += deepest * product.b_stride;
    slab.depth = smaller(product.depth - k, deepest);
    multiply_slab<Start::add, order>(slab);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
