#pragma once

#include "tile/fma_product.cuh"
#include "tile/mma.cuh"
#include "tile/split.cuh"

// The products of backward/sm80 over swizzled tiles in shared memory, 16 or 32 rows a warp. Elements have 16 bits; or
// are floats in two parts each (tile/split.cuh), for backward/tf32; or are multiplied in fp32 (tile/fma_product.cuh),
// for backward/fp32.

namespace flash_attention::sm80 {

using namespace abi;

/// The number of pairs of eight columns in a warp's part that exist. There are `total` pairs, and `each` of them a
/// part. Rows of 16-bit tiles have room for the parts of all warps, so a warp multiplies past the last column and drops
/// the result. In a tile of floats it would read past the tile.
template <Type type, int total, int each, int parts>
__device__ __forceinline__ int pairs_of(int part) {
  constexpr bool room = type == Type::float32 ? total == each * parts : total % each == 0;
  return room ? each : total - part * each;
}

/// C += A B^T over `columns` columns of both: rows [row, ...) of A, [column, ...) of B. In fp32 the sums are short ones
/// for the products that forward computes, too.
template <Features features, typename TileA, typename TileB, int columns, bool of_scores, int m_tiles, int blocks>
__device__ __forceinline__ void multiply_rows(float (&C)[m_tiles][blocks][4], unsigned A_smem, int row, unsigned B_smem,
                                              int column, int lane) {
  if constexpr (features.fp32_products)
    return tile::fma_rows<TileA, TileB, columns, of_scores>(C, A_smem, row, B_smem, column, lane);
  const unsigned A_address = tile::a_address<TileA>(A_smem, row, lane);
  const unsigned B_address = tile::b_transposed_address<TileB>(B_smem, column, lane);
  const auto load_a = [&](unsigned(&A)[4], int m, int k) {
    ptx::ldmatrix_x4(A, TileA::step(A_address, 2 * k) + m * 16 * 128);
  };
  const auto load_b = [&](unsigned(&B)[4], int n, int k) {
    ptx::ldmatrix_x4(B, TileB::step(B_address, 2 * k) + n * 16 * 128);
  };
  if constexpr (features.dtype == Type::float32) {
    tile::multiply_split<features, columns / 8, 1>(C, tile::split_rows(load_a), load_b);
  } else {
    tile::multiply<features.dtype, columns / 16>(C, load_a, load_b);
  }
}

/// C += A^T B over `rows` rows of both: columns [row, ...) of A, columns from 16 * first on of B, of which `pairs`
/// exist.
template <Features features, typename TileA, typename TileB, int rows, int m_tiles, int blocks>
__device__ __forceinline__ void multiply_columns(float (&C)[m_tiles][blocks][4], unsigned A_smem, int row, unsigned B_smem,
                                                 int first, int lane, int pairs) {
  if constexpr (features.fp32_products) {
    tile::fma_columns<TileA, TileB, rows>(C, A_smem, row, B_smem, first, lane, pairs);
  } else if constexpr (features.dtype == Type::float32) {
    const unsigned A_address = tile::contracted_address<TileA>(A_smem, lane);
    const unsigned B_address = tile::contracted_address<TileB>(B_smem, lane);
    tile::multiply_split<features, rows / 8, 1>(
        C,
        [&](auto& A, int m, int k) {
          unsigned values[4];
          tile::contracted_rows<TileA>(values, TileA::step(A_address, row / 4), m, k);
          A.set({values[0], values[2], values[1], values[3]});
        },
        [&](unsigned(&B)[4], int n, int k) { tile::contracted_rows<TileB>(B, B_address, first + n, k); }, pairs);
  } else {
    const unsigned A_address = tile::a_transposed_address<TileA>(A_smem, 0, lane);
    const unsigned B_address = tile::b_address<TileB>(B_smem, 0, lane);
    tile::multiply<features.dtype, rows / 16>(
        C,
        [&](unsigned(&A)[4], int m, int k) {
          ptx::ldmatrix_x4_trans(A, TileA::step(A_address, (row + 16 * m) / 8) + k * 16 * 128);
        },
        [&](unsigned(&B)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(B, TileB::step(B_address, 2 * (first + n)) + k * 16 * 128);
        },
        pairs);
  }
}

/// C += A B over `rows` rows of B: rows [row, ...) of A, columns from 16 * first on of B, of which `pairs` exist.
template <Features features, typename TileA, typename TileB, int rows, int m_tiles, int blocks>
__device__ __forceinline__ void multiply(float (&C)[m_tiles][blocks][4], unsigned A_smem, int row, unsigned B_smem,
                                         int first, int lane, int pairs) {
  if constexpr (features.fp32_products)
    return tile::fma_tile<TileA, TileB, rows>(C, A_smem, row, B_smem, first, lane, pairs);
  const unsigned A_address = tile::a_address<TileA>(A_smem, row, lane);
  const auto load_a = [&](unsigned(&A)[4], int m, int k) {
    ptx::ldmatrix_x4(A, TileA::step(A_address, 2 * k) + m * 16 * 128);
  };
  if constexpr (features.dtype == Type::float32) {
    const unsigned B_address = tile::ordered_address<TileB>(B_smem, lane);
    tile::multiply_split<features, rows / 8, 1>(
        C, tile::split_rows(load_a),
        [&](unsigned(&B)[4], int n, int k) { tile::ordered_rows<TileB>(B, B_address, first + n, k); }, pairs);
  } else {
    const unsigned B_address = tile::b_address<TileB>(B_smem, 0, lane);
    tile::multiply<features.dtype, rows / 16>(
        C, load_a,
        [&](unsigned(&B)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(B, TileB::step(B_address, 2 * (first + n)) + k * 16 * 128);
        },
        pairs);
  }
}

/// C += A B over all rows of B and all columns of C. A is in registers, in the layout of an accumulator.
template <Features features, typename TileB, int m_tiles, int steps, int blocks>
__device__ __forceinline__ void multiply_registers(float (&C)[m_tiles][blocks][4], const float (&A_reg)[m_tiles][steps][4],
                                                   unsigned B_smem, int lane) {
  if constexpr (features.dtype == Type::float32) {
    const unsigned B_address = tile::contracted_address<TileB>(B_smem, lane);
    tile::multiply_split<features, steps, steps / 2>(
        C, [&](auto& A, int m, int k) { tile::split_a(A, A_reg[m][k]); },
        [&](unsigned(&B)[4], int n, int k) { tile::contracted_rows<TileB>(B, B_address, n, k); });
  } else {
    const unsigned B_address = tile::b_address<TileB>(B_smem, 0, lane);
    tile::multiply<features.dtype, steps / 2>(
        C, [&](unsigned(&A)[4], int m, int k) { tile::pack_a<features.dtype>(A, A_reg[m][2 * k], A_reg[m][2 * k + 1]); },
        [&](unsigned(&B)[4], int n, int k) { ptx::ldmatrix_x4_trans(B, TileB::step(B_address, 2 * n) + k * 16 * 128); });
  }
}

}  // namespace flash_attention::sm80
