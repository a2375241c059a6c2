#pragma once

#include "tile/mma.cuh"
#include "tile/narrow_pairs.cuh"

// The two products of decode/sm80 with K and V in 8 bits, which become 16-bit elements in registers.
//
// ldmatrix moves pairs of bytes. As it reads K, a lane gets four neighbouring columns of a key, 4t to 4t + 3 of 16; the
// products take them as columns 2t, 2t + 1, 2t + 8 and 2t + 9, and Q is in the same order. As it transposes V, a lane
// gets columns 2g and 2g + 1 of keys 2t and 2t + 1: a block of eight even columns and one of eight odd ones. Each element
// of O has the sum that it always has; which column it is, Finish knows.

namespace flash_attention::decode {

using namespace abi;

/// S += Q K^T. load_Q(A, step) brings 16 columns of Q, load_codes(codes, n, step) 16 keys, columns of step and step + 1.
template <Type code, Type type, int steps, int blocks, typename LoadQ, typename LoadCodes>
__device__ __forceinline__ void multiply_codes(float (&S)[1][blocks][4], LoadQ load_Q, LoadCodes load_codes) {
  static_assert(steps % 2 == 0);
#pragma unroll
  for (int step = 0; step < steps; step += 2) {
    unsigned A[2][4];
    load_Q(A[0], step);
    load_Q(A[1], step + 1);
#pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
      unsigned codes[4];  // (keys 0-7, step), (keys 0-7, step + 1), (keys 8-15, step), (keys 8-15, step + 1)
      load_codes(codes, n, step);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const tile::TwoPairs first = tile::to_pairs<code, type>(codes[u]),
                             second = tile::to_pairs<code, type>(codes[2 + u]);
        const unsigned B[4] = {first.first, first.second, second.first, second.second};
        tile::mma_pair<type>(S[0][2 * n], S[0][2 * n + 1], A[u], B);
      }
    }
  }
}

/// O += P V. load_codes(codes, c, step) brings 16 keys of columns 32c to 32c + 31, transposed.
template <Type code, Type type, int blocks, int key_blocks, typename LoadCodes>
__device__ __forceinline__ void add_codes(float (&O)[1][blocks][4], const float (&P)[1][key_blocks][4],
                                          LoadCodes load_codes) {
  static_assert(blocks % 4 == 0);
#pragma unroll
  for (int step = 0; step < key_blocks / 2; ++step) {
    unsigned A[4];
    tile::pack_a<type>(A, P[0][2 * step], P[0][2 * step + 1]);
#pragma unroll
    for (int c = 0; c < blocks / 4; ++c) {
      unsigned codes[4];  // (keys 0-7, 16 columns), (keys 8-15, 16 columns), and the next 16 columns
      load_codes(codes, c, step);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const auto even_and_odd = [](unsigned x) { return tile::to_pairs<code, type, true>(x); };
        const tile::TwoPairs first = even_and_odd(codes[2 * u]), second = even_and_odd(codes[2 * u + 1]);
        const unsigned B[4] = {first.first, second.first, first.second, second.second};
        tile::mma_pair<type>(O[0][4 * c + 2 * u], O[0][4 * c + 2 * u + 1], A, B);
      }
    }
  }
}

}  // namespace flash_attention::decode
