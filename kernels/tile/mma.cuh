#pragma once

#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "tile/swizzle.cuh"

// Tensor-core products of a warp (mma.sync m16n8k16), fragments as plain arrays.
//
// An accumulator of 16 rows and 8 n columns is float[n][4]. Lane l holds, with g = l / 4 and t = l % 4:
//
//                      columns of block n
//             0    1    2    3   ...            element e of block n:  row g + 8 (e / 2),  column 8 n + 2 t + e % 2
//   row 0   [t=0: 0 1][t=1: 0 1] ...
//   row g   [t: e=0 1] ...                      lane 4 g + t has rows g and g + 8: four lanes share a row
//   row g+8 [t: e=2 3] ...
//
// The same layout, rounded and packed in pairs, is an A operand: blocks 2k and 2k + 1 are its columns 16 k .. 16 k +
// 15. So probabilities go from one product to the next without leaving the registers. wgmma's accumulators have the
// same layout.

namespace flash_attention::tile {

using namespace abi;

struct LanePlace {
  int row;     // g: the first row of a lane's pair
  int column;  // 2 t: its first column in each block of 8

  __device__ __forceinline__ explicit LanePlace(int lane) : row(lane / 4), column(lane % 4 * 2) {}
};

/// Rows [first_row, first_row + 16) as an A operand, and as a B operand of a product with the transposed tile. Both
/// functions return the address of the rows' first 16 columns; Tile::step moves on from it.
///
/// A: tiles (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
template <typename Tile>
__device__ __forceinline__ unsigned a_address(unsigned tile_address, int first_row, int lane) {
  return tile_address + Tile::offset(first_row + lane % 16, lane / 16);
}

/// B of C = A X^T: X's rows are C's columns. Tiles (columns 0-7, k 0-7), (columns 0-7, k 8-15), (columns 8-15, ...).
template <typename Tile>
__device__ __forceinline__ unsigned b_transposed_address(unsigned tile_address, int first_row, int lane) {
  return tile_address + Tile::offset(first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/// B of C = A X: X's rows are contracted, 16 columns of X a step; ldmatrix transposes. The lanes' addresses are those
/// of A.
template <typename Tile>
__device__ __forceinline__ unsigned b_address(unsigned tile_address, int first_row, int lane) {
  return a_address<Tile>(tile_address, first_row, lane);
}

/// A of C = X^T B: X's rows are contracted, its columns are C's rows; ldmatrix transposes. Tiles (k 0-7, rows 0-7),
/// (k 0-7, rows 8-15), (k 8-15, rows 0-7), (k 8-15, rows 8-15).
template <typename Tile>
__device__ __forceinline__ unsigned a_transposed_address(unsigned tile_address, int first_row, int lane) {
  return tile_address + Tile::offset(first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/// The products of two neighbouring blocks of eight columns: one ldmatrix has loaded both B operands.
template <Type type>
__device__ __forceinline__ void mma_pair(float (&first)[4], float (&second)[4], const unsigned (&A)[4],
                                         const unsigned (&B)[4]) {
  const unsigned B_first[2] = {B[0], B[1]}, B_second[2] = {B[2], B[3]};
  if constexpr (is_narrow(type)) {
    ptx::mma_m16n8k32<type, type>(first, A, B_first);
    ptx::mma_m16n8k32<type, type>(second, A, B_second);
  } else {
    ptx::mma_m16n8k16<type>(first, A, B_first);
    ptx::mma_m16n8k16<type>(second, A, B_second);
  }
}

/// C += A B over `steps` steps of 16, or of 32 codes of 8 bits in the places of 16 pairs. load_a(A, m, step) loads 16 rows
/// of A, load_b(B, n, step) 16 columns of B. Pairs of columns from `pairs` on are left out.
template <Type type, int steps, int m_tiles, int blocks, typename LoadA, typename LoadB>
__device__ __forceinline__ void multiply(float (&C)[m_tiles][blocks][4], LoadA load_a, LoadB load_b,
                                         int pairs = blocks / 2) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    unsigned A[m_tiles][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(A[m], m, step);
#pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
      if (n >= pairs) break;
      unsigned B[4];
      load_b(B, n, step);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) mma_pair<type>(C[m][2 * n], C[m][2 * n + 1], A[m], B);
    }
  }
}

/// Blocks 2k and 2k + 1 of an accumulator as the A operand of step k.
template <Type type>
__device__ __forceinline__ void pack_a(unsigned (&A)[4], const float (&even)[4], const float (&odd)[4]) {
  A[0] = ptx::pack<type>(even[0], even[1]);
  A[1] = ptx::pack<type>(even[2], even[3]);
  A[2] = ptx::pack<type>(odd[0], odd[1]);
  A[3] = ptx::pack<type>(odd[2], odd[3]);
}

}  // namespace flash_attention::tile
