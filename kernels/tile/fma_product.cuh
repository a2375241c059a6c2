#pragma once

#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/swizzle.cuh"

// Products of a warp on CUDA cores: floats in swizzled tiles, products and sums in fp32.
//
// A lane holds four rows and 8 to 32 columns of a result, C[m][n][4]: 32 to 128 multiply-adds for one element along the
// contracted axis. Operands are read 16 bytes at a time: four neighbours along the contracted axis, or four columns.
// The lanes of a warp read from all banks, or the same bytes. With g = lane / 4, t = lane % 4:
//
//   fma_rows      C += A B^T   rows g + 8 e / 2 + 16 m,  columns 8 n + 2 t + e % 2, as mma.sync's (tile/mma.cuh)
//   fma_tile      C += A B     rows g + 8 e / 2 + 16 m,  columns 16 (n / 2) + 4 t + 2 (n % 2) + e % 2
//   fma_columns   C += A^T B   rows 4 g + e / 2 + 2 m,   columns as fma_tile

namespace flash_attention::tile {

using Float4 = ptx::Vector<float, 4>;

/// The place in a tile of elements e = 0 and 1 (or 2 and 3) of block n of a result of fma_tile or fma_columns.
template <typename Tile>
__device__ __forceinline__ constexpr unsigned fma_offset(int row, int n, int t) {
  return Tile::offset(row, n / 2 * 4 + t) + static_cast<unsigned>(n % 2 * 8);
}

/// C += A B^T over `columns` columns of both: rows [row, row + 16 m_tiles) of A, [column, column + 8 blocks) of B. With
/// `short_sums` four products are added up before they are added to C, which halves the rounding error of one chain.
template <typename TileA, typename TileB, int columns, bool short_sums, int m_tiles, int blocks>
__device__ __forceinline__ void fma_rows(float (&C)[m_tiles][blocks][4], unsigned A_smem, int row, unsigned B_smem,
                                         int column, int lane) {
  const unsigned A_address = A_smem + TileA::offset(row + lane / 4, 0);
  const unsigned B_address = B_smem + TileB::offset(column + lane % 4 * 2, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < columns / 4; ++chunk) {
    const unsigned A_chunk = TileA::step(A_address, chunk), B_chunk = TileB::step(B_address, chunk);
    Float4 a[2 * m_tiles];
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) a[r] = ptx::load_shared<Float4>(A_chunk + r * 8 * 128);
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      const auto even = ptx::load_shared<Float4>(B_chunk + n * 8 * 128);
      const auto odd = ptx::load_shared<Float4>((B_chunk ^ 16u) + (n * 8 + 1) * 128);
      if constexpr (short_sums) {
        float sum[2 * m_tiles][2]{};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
#pragma unroll
          for (int r = 0; r < 2 * m_tiles; ++r) {
            sum[r][0] = x == 0 ? ptx::multiply(a[r][x], even[x]) : ptx::fma(a[r][x], even[x], sum[r][0]);
            sum[r][1] = x == 0 ? ptx::multiply(a[r][x], odd[x]) : ptx::fma(a[r][x], odd[x], sum[r][1]);
          }
        }
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) {
          C[r / 2][n][r % 2 * 2] += sum[r][0];
          C[r / 2][n][r % 2 * 2 + 1] += sum[r][1];
        }
        continue;
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) {
          float(&c)[4] = C[r / 2][n];
          c[r % 2 * 2] = ptx::fma(a[r][x], even[x], c[r % 2 * 2]);
          c[r % 2 * 2 + 1] = ptx::fma(a[r][x], odd[x], c[r % 2 * 2 + 1]);
        }
      }
    }
  }
}

/// C += A B over `rows` rows of B: rows [row, row + 16 m_tiles) of A, columns from 16 * first on of B, of which `pairs`
/// times 16 exist.
template <typename TileA, typename TileB, int rows, int m_tiles, int blocks>
__device__ __forceinline__ void fma_tile(float (&C)[m_tiles][blocks][4], unsigned A_smem, int row, unsigned B_smem,
                                         int first, int lane, int pairs = blocks / 2) {
  const unsigned A_address = A_smem + TileA::offset(row + lane / 4, 0);
  const unsigned B_address = B_smem + lane % 4 * 16;
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += 8) {  // the swizzle repeats every 8 rows
    Float4 a[2 * m_tiles];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k % 4 == 0) {
        const unsigned A_chunk = TileA::step(A_address, (begin + k) / 4);
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) a[r] = ptx::load_shared<Float4>(A_chunk + r * 8 * 128);
      }
      const unsigned B_row = (B_address ^ static_cast<unsigned>(k * 16)) + (begin + k) * 128;
#pragma unroll
      for (int n = 0; n < blocks / 2; ++n) {
        if (n >= pairs) break;
        const auto b = ptx::load_shared<Float4>(TileB::step(B_row, 4 * (first + n)));
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& sum = C[r / 2][2 * n + c / 2][r % 2 * 2 + c % 2];
            sum = ptx::fma(a[r][k % 4], b[c], sum);
          }
        }
      }
    }
  }
}

/// C += A^T B over `rows` rows of both: columns [row, row + 32) of A, and columns of B from 16 * first on, of which
/// `pairs` times 16 exist.
template <typename TileA, typename TileB, int rows, int blocks>
__device__ __forceinline__ void fma_columns(float (&C)[2][blocks][4], unsigned A_smem, int row, unsigned B_smem, int first,
                                            int lane, int pairs = blocks / 2) {
  const unsigned A_address = TileA::step(A_smem + lane / 4 * 16, row / 4);  // row is a multiple of 32
  const unsigned B_address = B_smem + lane % 4 * 16;
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += 8) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto a = ptx::load_shared<Float4>((A_address ^ static_cast<unsigned>(k * 16)) + (begin + k) * 128);
      const unsigned B_row = (B_address ^ static_cast<unsigned>(k * 16)) + (begin + k) * 128;
#pragma unroll
      for (int n = 0; n < blocks / 2; ++n) {
        if (n >= pairs) break;
        const auto b = ptx::load_shared<Float4>(TileB::step(B_row, 4 * (first + n)));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& sum = C[r / 2][2 * n + c / 2][r % 2 * 2 + c % 2];
            sum = ptx::fma(a[r], b[c], sum);
          }
        }
      }
    }
  }
}

}  // namespace flash_attention::tile
