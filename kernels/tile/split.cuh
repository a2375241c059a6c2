#pragma once

#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "tile/mma.cuh"

// Products of floats on tensor cores, which read 11 bits of a float (tf32, mma.sync m16n8k8). A float is a sum of two such
// numbers but for its last bits, x = high + low, and a product is three:
//
//   A B = high(A) high(B) + high(A) low(B) + low(A) high(B)              low(A) low(B) is below 2^-22 of it
//
// Tensor cores cut off what a sum has behind its last bit. Over a long sum that grows to many units, so a chain of products
// is short, the small ones first, and chains are added in fp32, rounded to nearest.
//
// With Features::one_product (precision = tf32) a product is high(A) high(B) alone.
//
// Fragments are those of 16-bit elements with a float in the place of a pair: rows of 16 bytes are four columns, ldmatrix
// brings them as they are. It transposes pairs of 16 bits only, so operands whose rows are contracted come by single loads.

namespace flash_attention::tile {

using namespace abi;

/// Registers of an operand in two parts, or the higher one alone. An Inf has a NaN as its lower part: rows that this
/// reaches are done again (forward/repair.cuh, backward/repair.cuh). The tensor cores ignore the lower part's last 13 bits.
template <int registers, int products>
struct Split {
  static constexpr bool has_low = products == 3;
  unsigned high[registers];
  unsigned low[has_low ? registers : 1];

  __device__ __forceinline__ void set(int r, float value) {
    // cvt.rna.tf32 of a finite number: the instruction is four, which look at Inf and NaN.
    high[r] = (__builtin_bit_cast(unsigned, value) + 0x1000u) & 0xffffe000u;
    if constexpr (has_low) low[r] = __builtin_bit_cast(unsigned, value - __builtin_bit_cast(float, high[r]));
  }
  __device__ __forceinline__ void set(const unsigned (&values)[registers]) {
#pragma unroll
    for (int r = 0; r < registers; ++r) set(r, __builtin_bit_cast(float, values[r]));
  }
};

/// The products of one kind for two neighbouring blocks of eight columns and every 16 rows: neighbours are independent.
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

/// load_a of multiply_split from one that brings registers.
template <typename LoadA>
__device__ __forceinline__ auto split_rows(const LoadA& load_a) {
  return [&](auto& A, int m, int step) {
    unsigned values[4];
    load_a(values, m, step);
    A.set(values);
  };
}

/// C += A B over `steps` steps of 8, in chains of two steps, of four if a product is one. load_a(A, m, step) brings Split
/// of 16 rows, load_b(B, n, step) registers of 16 columns; a column pair at or past `pairs` is left out. So many chains are
/// unrolled as A needs whose elements are registers; of others one, which keeps the next loads from filling the registers.
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

/// A block of an accumulator as the A operand of a product that contracts its 8 columns: element t is column 2t, element
/// t + 4 column 2t + 1, so that they stay in their lanes. contracted_rows brings B's rows in the same order.
template <int products>
__device__ __forceinline__ void split_a(Split<4, products>& A, const float (&block)[4]) {
  A.set(0, block[0]);
  A.set(1, block[2]);
  A.set(2, block[1]);
  A.set(3, block[3]);
}

/// B of C = A X where X's rows are contracted, in the order of split_a: the address of row 2t, column g of its first block.
/// Of the 32 lanes no two meet in a bank.
template <typename Tile>
__device__ __forceinline__ unsigned contracted_address(unsigned tile_address, int lane) {
  const int row = lane % 4 * 2, column = lane / 4;
  return tile_address + Tile::offset(row, column / 4) + column % 4 * 4;
}

/// 16 columns from 16 n on of rows 8 step .. 8 step + 7.
template <typename Tile>
__device__ __forceinline__ void contracted_rows(unsigned (&B)[4], unsigned address, int n, int step) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const unsigned even = Tile::step(address, 2 * (2 * n + block)) + step * 8 * 128;
    B[2 * block] = ptx::load_shared<unsigned>(even);
    B[2 * block + 1] = ptx::load_shared<unsigned>((even ^ 16u) + 128);  // the next row
  }
}

/// The same with rows in their order, as ldmatrix brings A's columns: t and t + 4. Two lanes meet in a bank.
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
    B[2 * block + 1] = ptx::load_shared<unsigned>((first ^ 64u) + 4 * 128);  // four rows on
  }
}

}  // namespace flash_attention::tile
