#pragma once

// What the kernels of backward/sm90 share: products of tiles in shared memory, rows that must not be multiplied, the way of
// a gradient from registers to its tensor.

#include "backward/sm90_shape.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"

namespace flash_attention::backward_sm90 {

/// Named barrier of one warpgroup; followed by one for each.
constexpr int barrier_warpgroup = 8;

// `fresh` is 0, hidden from the compiler: descriptors are added up where they are used, not kept in registers.

/// D = A B^T over the head dimension; A and B are tiles of 64 rows in chunks.
template <Type type, int steps>
__device__ __forceinline__ void issue_dots(float (&D)[tile_rows / 2], const void* A, const void* B, int fresh) {
  const unsigned long long A_desc = ptx::wgmma_descriptor(A, 0, 1024) + fresh;
  const unsigned long long B_desc = ptx::wgmma_descriptor(B, 0, 1024) + fresh;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int offset = (step / 4 * chunk_bytes + step % 4 * 32) / 16;
    ptx::wgmma_ss<type, tile_rows, ptx::Major::k, ptx::Major::k>(D, A_desc + offset, B_desc + offset, step != 0);
  }
  ptx::wgmma_commit();
}

/// D += A B over the 64 rows of B; A is in registers.
template <Type type, int width>
__device__ __forceinline__ void issue_rows(float (&D)[width / 2], const unsigned (&A)[tile_rows / 16][4], const void* B,
                                           int fresh) {
  const unsigned long long B_desc = ptx::wgmma_descriptor(B, chunk_bytes, 1024) + fresh;
  ptx::wgmma_fence();  // A has been written by ordinary instructions
#pragma unroll
  for (int step = 0; step < tile_rows / 16; ++step) {
    ptx::wgmma_rs<type, width, ptx::Major::mn>(D, A[step], B_desc + step * 16 * 128 / 16, true);
  }
  ptx::wgmma_commit();
}

/// Neither half of the pair is NaN or Inf.
template <Type type>
__device__ __forceinline__ bool finite(unsigned pair) {
  constexpr unsigned exponent = type == Type::bfloat16 ? 0x7f80u : 0x7c00u;
  return (pair & exponent) != exponent && (pair >> 16 & exponent) != exponent;
}

/// Zeroes the rows of a tile of Q or dO past the last query: they are multiplied by the zeros of P and dS. Every warpgroup
/// writes the same zeros before its own products read them.
template <BackwardConfig config, typename Chunk, int chunks>
__device__ __forceinline__ void clear_foreign_rows(Chunk (&tile)[chunks], int warpgroup, int thread, int used_rows) {
  if constexpr (Shape<config>::foreign_rows) {
    if (used_rows >= tile_rows) return;
    const int pieces = (tile_rows - used_rows) * 8;  // of 16 bytes, in each chunk
    for (int i = thread; i < pieces * chunks; i += wg_threads) {
      const int chunk = i / pieces, piece = i - chunk * pieces;
      ptx::store_shared(ptx::shared_address(tile[chunk]) + used_rows * 128 + piece * 16, ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();                                     // the zeros before the products' reads
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // those of the whole warpgroup
  }
}

/// The 64 rows of a warpgroup's accumulator, times a factor, to the rows of a tensor that exist.
template <Type type, int dim, int count>
__device__ __forceinline__ void write_rows(const tile::Rows<ptx::Element<type>>& rows, const float (&values)[count],
                                           float factor, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * (thread / 32) + lane / 4 + 8 * half;
    if (row >= rows.count) continue;
    ptx::Element<type>* first = rows.data + row * rows.stride + 2 * (lane % 4);
#pragma unroll
    for (int group = 0; group < dim / 8; ++group) {
      const unsigned pair =
          ptx::pack<type>(values[4 * group + 2 * half] * factor, values[4 * group + 2 * half + 1] * factor);
      ptx::store_global(reinterpret_cast<unsigned*>(first + 8 * group), pair);
    }
  }
}

}  // namespace flash_attention::backward_sm90
