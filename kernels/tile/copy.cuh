#pragma once

#include "ptx/async.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "tile/sequence.cuh"
#include "tile/swizzle.cuh"

// Copies tiles between global and swizzled shared memory, 16 bytes for a thread and instruction. Rows begin at
// multiples of 16 bytes.

namespace flash_attention::tile {

/// For wgmma, which reads by another proxy: an arrival of this thread when its copies have landed, but for the last `pending`
/// groups.
template <int pending>
__device__ __forceinline__ void publish(ptx::Mbarrier& full) {
  ptx::copy_async_wait<pending>();
  ptx::fence_async_shared();
  ptx::mbarrier_arrive(full);
}

/// A thread's part in copying tiles of the same rows, one after another. Rows that do not exist, and columns from `dim`
/// on, become zero: their copies have 0 bytes, so their addresses are not used. The caller commits and waits.
template <int threads, int dim, typename Tile, typename Element>
struct TileCopy {
  static constexpr int chunks = Tile::columns / 8, per_chunk = Tile::template per_chunk<Element>;
  // A thread keeps its column and its place in the swizzle, so it only needs one pointer and one address for all of its
  // rows. That requires a first row for every thread: 16 columns of 64 rows are too few for 256 threads.
  static constexpr bool keeps_column =
      threads % (8 * chunks) == 0 && dim == chunks * per_chunk && threads / chunks <= Tile::rows;
  static_assert(dim % per_chunk == 0 && dim <= chunks * per_chunk);

  const Element* source;  // of this thread's first chunk, or of the tile
  long long stride;
  int count;  // rows that exist, from the tile's first on

  __device__ __forceinline__ TileCopy(const Rows<Element>& rows, int thread)
      : source(rows.data), stride(rows.stride), count(rows.count) {
    if constexpr (keeps_column) source += thread / chunks * stride + thread % chunks * per_chunk;
  }

  /// Moves to the tile that begins `rows` rows later.
  __device__ __forceinline__ void move(int rows) {
    source += rows * stride;
    count -= rows;
  }

  /// Starts the copy. Without `some_missing`, the caller knows that every row exists.
  template <bool some_missing>
  __device__ __forceinline__ void start(unsigned address, int thread) const {
    if constexpr (keeps_column) {
      constexpr int step = threads / chunks;
      const unsigned target = address + Tile::offset(thread / chunks, thread % chunks);
      const Element* from = source;
#pragma unroll
      for (int begin = 0; begin < Tile::rows; begin += step) {
        ptx::copy_async(target + begin * 128, from, !some_missing || begin + thread / chunks < count ? 16 : 0);
        from += step * stride;
      }
    } else {
      // If this were unrolled further, addresses would fill the registers.
#pragma unroll 2
      for (int begin = 0; begin < Tile::rows * chunks; begin += threads) {
        const int index = begin + thread, row = index / chunks, chunk = index % chunks;
        if (Tile::rows * chunks % threads != 0 && row >= Tile::rows) break;
        const bool exists = (!some_missing || row < count) && (dim == chunks * per_chunk || chunk * per_chunk < dim);
        ptx::copy_async(address + Tile::offset(row, chunk), source + row * stride + chunk * per_chunk, exists ? 16 : 0);
      }
    }
  }
};

/// Copies a single tile.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void copy_tile_async(unsigned address, const Rows<Element>& from, int thread) {
  TileCopy<threads, dim, Tile, Element>(from, thread).template start<true>(address, thread);
}

/// Writes `rows` rows of a tile to global memory: the rows that exist, and the columns before `dim`.
template <int threads, int dim, int rows, typename Tile, typename Element>
__device__ __forceinline__ void store_tile(unsigned address, int first_row, const Rows<Element>& to, int thread) {
  constexpr int per_chunk = Tile::template per_chunk<Element>, chunks = dim / per_chunk;
#pragma unroll
  for (int begin = 0; begin < rows * chunks; begin += threads) {
    const int index = begin + thread, row = first_row + index / chunks, chunk = index % chunks;
    if (rows * chunks % threads != 0 && index >= rows * chunks) break;
    if (row >= to.count) continue;
    using Chunk = ptx::Vector<unsigned, 4>;
    const auto values = ptx::load_shared<Chunk>(address + Tile::offset(row, chunk));
    ptx::store_global(reinterpret_cast<Chunk*>(to.data + row * to.stride + chunk * per_chunk), values);
  }
}

}  // namespace flash_attention::tile
