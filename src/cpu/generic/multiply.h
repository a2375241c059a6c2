#pragma once

// The matrix product that all of attention is made of: C[row][lane] (+)= sum over k of A(row, k) * B[k][lane], with the
// lanes of B and C in vectors and the elements of A broadcast. A register tile of C stays in registers for all of k. B may
// have any element type; A and C are float. (For an instruction that multiplies pairs, an element of A and of B is a pair.)

#include "cpu/generic/element.h"

namespace flash_attention::cpu {
namespace {

enum class Start {
  zero,    // C = A B
  add,     // C += A B
  rescale  // C = C * factor[lane] + A B
};

/// How A lies in memory: element (row, k) at A[row * stride + k], or at A[k * stride + row].
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

/// All rows of a strip `vectors` wide that begins at lane `lane`; the last rows in tiles of half the height each time.
template <int rows, int vectors, Start start, Order order, class T>
inline void multiply_strip(const Product<T>& product, int row, int lane) {
  const std::int64_t row_step = order == Order::row_major ? product.a_stride : 1;
  for (; row + rows <= product.rows; row += rows) {
    multiply_tile<rows, vectors, start, order>(product, product.A + row * row_step, product.B + lane,
                                               product.C + row * product.c_stride + lane,
                                               start == Start::rescale ? product.factor + lane : nullptr);
  }
  if constexpr (rows > 1) {
    if (row < product.rows) multiply_strip<rows / 2, vectors, start, order>(product, row, lane);
  }
}

/// A few rows in strips as wide as the registers allow: narrow ones would wait for their sums.
template <int rows, Start start, Order order, class T>
inline void multiply_few(const Product<T>& product) {
  constexpr int room = tile_rows * tile_vectors / rows;
  constexpr int widest = room >= 8 ? 8 : room >= 4 ? 4 : 2;
  int v = 0;
  for (; v + widest <= product.vectors; v += widest)
    multiply_strip<rows, widest, start, order>(product, 0, v * vector_lanes);
  if constexpr (widest == 8) {
    for (; v + 4 <= product.vectors; v += 4) multiply_strip<rows, 4, start, order>(product, 0, v * vector_lanes);
  }
  if constexpr (widest >= 4) {
    for (; v + 2 <= product.vectors; v += 2) multiply_strip<rows, 2, start, order>(product, 0, v * vector_lanes);
  }
  for (; v < product.vectors; ++v) multiply_strip<rows, 1, start, order>(product, 0, v * vector_lanes);
}

template <Start start, Order order, class T>
inline void multiply_slab(const Product<T>& product) {
  if (product.rows == 1) return multiply_few<1, start, order>(product);
  if (product.rows <= 4) return multiply_few<4, start, order>(product);
  for (int v = 0; v < product.vectors;) {
    const int left = product.vectors - v;
    const int width = left == tile_vectors + 1 ? (left + 1) / 2 : left < tile_vectors ? left : tile_vectors;
    const int lane = v * vector_lanes;
    switch (width) {
      case 1:
        multiply_strip<2 * tile_rows, 1, start, order>(product, 0, lane);
        break;
      case 2:
        multiply_strip<tile_rows, 2, start, order>(product, 0, lane);
        break;
      default:
        multiply_strip<tile_rows, tile_vectors, start, order>(product, 0, lane);
        break;
    }
    v += width;
  }
}

/// In slabs of B that stay in L1 while the rows go by.
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
