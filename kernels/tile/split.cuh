#pragma once

#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "tile/mma.cuh"

// Products of floats on tensor cores, which read 11 bits of a float (tf32, mma.sync m16n8k8). A float is the sum of two
// such numbers, except for its last bits: x = high + low. So a product is three:
//
//   A B = high(A) high(B) + high(A) low(B) + low(A) high(B)              low(A) low(B) is below 2^-22 of it
//
// Tensor cores truncate a sum after its last bit. Over a long sum that error grows to many units. So a chain of
// products is short and begins with the small ones, and chains are added in fp32, rounded to nearest.
//
// With Features::one_product (precision = tf32) a product is only high(A) high(B).
//
// Fragments are those of 16-bit elements with a float in the place of a pair: rows of 16 bytes are four columns, which
// ldmatrix loads as they are. But ldmatrix transposes pairs of 16 bits only, so operands whose rows are contracted are
// read by single loads.

namespace flash_attention::tile {

using namespace abi;

/// Registers of an operand in two parts, or of the higher part only. An Inf has a NaN as its lower part: rows that it
/// reaches are computed again (forward/repair.cuh, backward/repair.cuh). The tensor cores ignore the last 13 bits of
/// the lower part.
template <int registers, int products>
struct Split {
  static constexpr bool has_low = products == 3;
  unsigned high[registers];
  unsigned low[has_low ? registers : 1];

  __device__ __forceinline__ void set(int r, float value) {
    // cvt.rna.tf32 of a finite number. The instruction itself compiles to four, which also test for Inf and NaN.
    high[r] = (__builtin_bit_cast(unsigned, value) + 0x1000u) & 0xffffe000u;
    if constexpr (has_low) low[r] = __builtin_bit_cast(unsigned, value - __builtin_bit_cast(float, high[r]));
  }
  __device__ __forceinline__ void set(const unsigned (&values)[registers]) {
#pragma unroll
    for (int r = 0; r < registers; ++r) set(r, __builtin_bit_cast(float, values[r]));
  }
};

/// The products of one kind for two neighbouring blocks of eight columns and every 16 rows. Neighbours do not depend on
/// each other.
template <int m_tiles, typename Rows, typename Columns>
__device__ __forceinline__ void mma_tf32(float (&sum)[m_tiles][2][4], const Rows& rows_of, const Columns& columns) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const unsigned B[2] = {columns[2 * block], columns[2 * block + 1]};
      ptx::mma_m16n8k8_tf32(sum[m][block], rows_of(m), B);
    }
  }
}

/// load_a of multiply_split, from one that loads registers.
template <typename LoadA>
__device__ __forceinline__ auto split_rows(const LoadA& load_a) {
  return [&](auto& A, int m, int step) {
    unsigned values[4];
    load_a(values, m, step);
    A.set(values);
  };
}

/// C += A B over `steps` steps of 8, in chains of two steps, or of four with one_product. load_a(A, m, step) loads
/// Split of 16 rows, load_b(B, n, step) registers of 16 columns; pairs of columns from `pairs` on are left out. If A's
/// elements are in registers, as many chains are unrolled as A needs; otherwise one, so that the loads of the next
/// chain do not fill the registers.
template <Features features, int steps, int unrolled, int m_tiles, int blocks, typename LoadA, typename LoadB>
__device__ __forceinline__ void multiply_split(float (&C)[m_tiles][blocks][4], LoadA load_a, LoadB load_b,
                                               int pairs = blocks / 2) {
  constexpr int products = features.one_product ? 1 : 3;
  constexpr int chain = products == 1 && steps % 4 == 0 ? 4 : 2;
  static_assert(steps % chain == 0);
#pragma unroll(unrolled)
  for (int begin = 0; begin < steps; begin += chain) {
    Split<4, products> A[chain][m_tiles];
#pragma unroll
    for (int s = 0; s < chain; ++s) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) load_a(A[s][m], m, begin + s);
    }
#pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
      if (n >= pairs) break;
      Split<4, products> B[chain];
      float sum[m_tiles][2][4]{};
#pragma unroll
      for (int s = 0; s < chain; ++s) {
        unsigned values[4];
        load_b(values, n, begin + s);
        B[s].set(values);
        if constexpr (products == 3) {
          mma_tf32(
              sum, [&](int m) -> const unsigned(&)[4] { return A[s][m].low; }, B[s].high);
          mma_tf32(
              sum, [&](int m) -> const unsigned(&)[4] { return A[s][m].high; }, B[s].low);
        }
      }
#pragma unroll
      for (int s = 0; s < chain; ++s)
        mma_tf32(
            sum, [&](int m) -> const unsigned(&)[4] { return A[s][m].high; }, B[s].high);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 8; ++e) C[m][2 * n + e / 4][e % 4] += sum[m][e / 4][e % 4];
      }
    }
  }
}

/// A block of an accumulator as the A operand of a product that contracts its 8 columns. Element t is column 2t, and
/// element t + 4 is column 2t + 1, so elements stay in their lanes. contracted_rows loads B's rows in the same order.
template <int products>
__device__ __forceinline__ void split_a(Split<4, products>& A, const float (&block)[4]) {
  A.set(0, block[0]);
  A.set(1, block[2]);
  A.set(2, block[1]);
  A.set(3, block[3]);
}

/// B of C = A X whose contracted rows of X are in the order of split_a: the address of row 2t, column g of its first
/// block. All 32 lanes use different banks.
template <typename Tile>
__device__ __forceinline__ unsigned contracted_address(unsigned tile_address, int lane) {
  const int row = lane % 4 * 2, column = lane / 4;
  return tile_address + Tile::offset(row, column / 4) + column % 4 * 4;
}

/// Loads 16 columns from 16 n on of rows 8 step .. 8 step + 7.
template <typename Tile>
__device__ __forceinline__ void contracted_rows(unsigned (&B)[4], unsigned address, int n, int step) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const unsigned even = Tile::step(address, 2 * (2 * n + block)) + step * 8 * 128;
    B[2 * block] = ptx::load_shared<unsigned>(even);
    B[2 * block + 1] = ptx::load_shared<unsigned>((even ^ 16u) + 128);  // the next row
  }
}

/// The same with rows in their own order, in which ldmatrix loads A's columns: t and t + 4. Two lanes share a bank.
template <typename Tile>
__device__ __forceinline__ unsigned ordered_address(unsigned tile_address, int lane) {
  const int row = lane % 4, column = lane / 4;
  return tile_address + Tile::offset(row, column / 4) + column % 4 * 4;
}
template <typename Tile>
__device__ __forceinline__ void ordered_rows(unsigned (&B)[4], unsigned address, int n, int step) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const unsigned first = Tile::step(address, 2 * (2 * n + block)) + step * 8 * 128;
    B[2 * block] = ptx::load_shared<unsigned>(first);
    B[2 * block + 1] = ptx::load_shared<unsigned>((first ^ 64u) + 4 * 128);  // four rows later
  }
}

}  // namespace flash_attention::tile
