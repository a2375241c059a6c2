#pragma once

// What the kernels of backward/sm90 share: products of tiles in shared memory, zeros for rows that must not be
// multiplied, and stores of a gradient from registers to its tensor.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/memory.cuh"

namespace flash_attention::backward_sm90 {

template <int count>
__device__ __forceinline__ void zero(float (&sums)[count]) {
#pragma unroll
  for (float& x : sums) x = 0;
}

/// The named barrier of the first warpgroup. Those of the other warpgroups follow.
constexpr int barrier_warpgroup = 8;

// `fresh` is 0, hidden from the compiler: so descriptors are computed at each use, not kept in registers.

/// The offset from a descriptor of a tile to the descriptor of 16 of its columns.
__device__ __forceinline__ constexpr int dots_offset(int step) { return (step / 4 * chunk_bytes + step % 4 * 32) / 16; }

/// D = A B^T over the head dimension. A and B are tiles of 64 rows in chunks. issue_last() may add one more product to
/// D.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <Type type, int steps, typename IssueLast = Nothing>
__device__ __forceinline__ void issue_dots(float (&D)[tile_rows / 2], const void* A, const void* B, int fresh,
                                           IssueLast issue_last = {}) {
  const unsigned long long A_desc = ptx::wgmma_descriptor(A, 0, 1024) + fresh;
  const unsigned long long B_desc = ptx::wgmma_descriptor(B, 0, 1024) + fresh;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    ptx::wgmma_ss<type, tile_rows, ptx::Major::k, ptx::Major::k>(D, A_desc + dots_offset(step), B_desc + dots_offset(step),
                                                                 step != 0);
  }
  issue_last();
  ptx::wgmma_commit();
}

/// D += A B over the 64 rows of B. A is in registers.
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

/// Sets a bit of the result if the half of the pair there is NaN or Inf: the sum with the last bit of the exponent
/// carries out of an exponent of all ones.
template <Type type>
__device__ __forceinline__ unsigned not_finite(unsigned pair) {
  constexpr unsigned exponent = type == Type::bfloat16 ? 0x7f80u : 0x7c00u, last = exponent & -exponent;
  return ((pair & exponent * 0x10001u) + last * 0x10001u) & 0x80008000u;
}

/// Whether neither half of the pair is NaN or Inf.
template <Type type>
__device__ __forceinline__ bool finite(unsigned pair) {
  return not_finite<type>(pair) == 0;
}

/// Zeroes the rows of a tile of Q or dO past the last query, because products multiply them by the zeros of P and dS.
/// Every warpgroup writes the same zeros before its own products read them.
template <BackwardConfig config, typename Chunk, int chunks>
__device__ __forceinline__ void clear_next_sequence_rows(Chunk (&tile)[chunks], int warpgroup, int thread, int used_rows) {
  if constexpr (Shape<config>::next_sequence_rows) {
    if (used_rows >= tile_rows) return;
    const int pieces = (tile_rows - used_rows) * 8;  // of 16 bytes, in each chunk
    for (int i = thread; i < pieces * chunks; i += wg_threads) {
      const int chunk = i / pieces, piece = i - chunk * pieces;
      ptx::store_shared(ptx::shared_address(tile[chunk]) + used_rows * 128 + piece * 16, ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();                                     // the zeros are visible to the products
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // the whole warpgroup has written its zeros
  }
}

/// Eight elements of a row: one store if the rows of the tensor are aligned to 16 bytes, else four.
template <typename Element>
__device__ __forceinline__ void store_eight(Element* to, const ptx::Vector<unsigned, 4>& words, bool aligned) {
  if (aligned) {
    ptx::store_global(reinterpret_cast<ptx::Vector<unsigned, 4>*>(to), words);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) ptx::store_global(reinterpret_cast<unsigned*>(to) + w, words[w]);
  }
}

/// Four neighbouring lanes have four words each: word g of lane l becomes word l of lane g.
__device__ __forceinline__ ptx::Vector<unsigned, 4> transposed(ptx::Vector<unsigned, 4> words, int lane) {
  const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
  const auto exchange = [](unsigned& mine, unsigned& other, bool second, int distance) {
    const unsigned received = ptx::shuffle_xor(second ? mine : other, distance);
    (second ? mine : other) = received;
  };
  exchange(words[0], words[1], odd, 1);
  exchange(words[2], words[3], odd, 1);
  exchange(words[0], words[2], upper, 2);
  exchange(words[1], words[3], upper, 2);
  return words;
}

/// Writes the 64 rows of a warpgroup's accumulator, times a factor, to those rows of a tensor that exist. Four lanes have
/// 8 columns of a row: they exchange 32 columns, so that each stores 8 of them at once.
template <Type type, int dim, int count>
__device__ __forceinline__ void write_rows(const tile::Rows<ptx::Element<type>>& rows, const float (&values)[count],
                                           float factor, int thread) {
  constexpr int groups = dim / 8, whole = groups / 4 * 4;
  const int lane = thread % 32;
  const bool aligned = (reinterpret_cast<unsigned long long>(rows.data) | rows.stride * 2) % 16 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * (thread / 32) + lane / 4 + 8 * half;
    ptx::Element<type>* const first = rows.data + row * rows.stride;
    const auto pair = [&](int group) {
      return ptx::pack<type>(values[4 * group + 2 * half] * factor, values[4 * group + 2 * half + 1] * factor);
    };
#pragma unroll
    for (int group = 0; group < whole; group += 4) {
      const ptx::Vector<unsigned, 4> words{pair(group), pair(group + 1), pair(group + 2), pair(group + 3)};
      const auto eight = transposed(words, lane);  // all lanes take part
      if (row < rows.count) store_eight(first + 8 * (group + lane % 4), eight, aligned);
    }
#pragma unroll
    for (int group = whole; group < groups; ++group) {
      if (row < rows.count) ptx::store_global(reinterpret_cast<unsigned*>(first + 8 * group + 2 * (lane % 4)), pair(group));
    }
  }
}

/// Writes the 16 rows of a warp's accumulator, times a factor. They go through shared memory, so that whole rows leave
/// together. `staging` belongs to this warp and has room for 16 rows of `width` elements.
template <Type type, int dim, int width>
__device__ __forceinline__ void write_staged_rows(const tile::Rows<ptx::Element<type>>& rows,
                                                  const float (&values)[width / 2], float factor, void* staging, int lane) {
  lane = ptx::hide_from_compiler(lane);  // nothing computed from it is kept in registers for the next call
  constexpr int row_bytes = 2 * width, pieces = dim / 8;
  constexpr int swizzle = width % 64 == 0 ? 7 : 3;  // of the 16-byte pieces of a row, so that rows use different banks
  char* const base = static_cast<char*>(staging);
#pragma unroll
  for (int group = 0; group < width / 16; ++group) {
    const int row = lane & 15, piece = 2 * group + (lane >> 4);
    const float* v = values + 8 * group;
    ptx::stmatrix_x4(base + row * row_bytes + (piece ^ (row & swizzle)) * 16, ptx::pack<type>(v[0] * factor, v[1] * factor),
                     ptx::pack<type>(v[2] * factor, v[3] * factor), ptx::pack<type>(v[4] * factor, v[5] * factor),
                     ptx::pack<type>(v[6] * factor, v[7] * factor));
  }
  __syncwarp();
  const bool aligned = (reinterpret_cast<unsigned long long>(rows.data) | rows.stride * 2) % 16 == 0;
  const auto staged = [&](int row, int piece) {
    return ptx::load_shared<ptx::Vector<unsigned, 4>>(ptx::shared_address(base) + row * row_bytes +
                                                      (piece ^ (row & swizzle)) * 16);
  };
  if constexpr (pieces > 1 && 32 % pieces == 0) {
    if (rows.count >= 16 && aligned) {  // the usual case: all loads, then all stores
      constexpr int rows_at_once = 32 / pieces, count = 16 / rows_at_once;
      const int row = lane / pieces, piece = lane % pieces;
      ptx::Vector<unsigned, 4> words[count];
#pragma unroll
      for (int i = 0; i < count; ++i) words[i] = staged(row + i * rows_at_once, piece);
      auto* to = reinterpret_cast<ptx::Vector<unsigned, 4>*>(rows.row(row) + 8 * piece);
#pragma unroll
      for (int i = 0; i < count; ++i, to += rows_at_once * rows.stride / 8) ptx::store_global(to, words[i]);
      return;
    }
  }
#pragma unroll 1
  for (int i = lane; i < 16 * pieces; i += 32) {
    const int row = i / pieces, piece = i % pieces;
    if (row >= rows.count) break;
    store_eight(rows.row(row) + 8 * piece, staged(row, piece), aligned);
  }
}

}  // namespace flash_attention::backward_sm90
