#pragma once

#include "ptx/async.cuh"
#include "ptx/memory.cuh"
#include "tile/sequence.cuh"
#include "tile/swizzle.cuh"

// Tiles between global and swizzled shared memory, 16 bytes a thread and instruction. Rows begin at multiples of 16 bytes.

namespace flash_attention::tile {

/// Starts to copy the rows of a tile; rows that do not exist, and columns at or past `dim`, become zero. The caller commits
/// and waits.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void copy_tile_async(unsigned address, const Rows<Element>& from, int thread) {
  constexpr int chunks = Tile::columns / 8;
  static_assert(sizeof(Element) == 2 && dim % 8 == 0 && dim <= Tile::columns);
  if constexpr (threads % (8 * chunks) == 0 && dim == Tile::columns) {
    // A thread keeps its column, and its place in the swizzle: one pointer and one address walk down the rows.
    constexpr int step = threads / chunks;
    const int row = thread / chunks, chunk = thread % chunks;
    const Element* source = from.data + row * from.stride + chunk * 8;
    const unsigned target = address + Tile::offset(row, chunk);
#pragma unroll
    for (int begin = 0; begin < Tile::rows; begin += step) {
      const bool exists = begin + row < from.count;
      ptx::copy_async(target + begin * 128, exists ? source : from.data, exists ? 16 : 0);
      source += step * from.stride;
    }
  } else {
#pragma unroll
    for (int begin = 0; begin < Tile::rows * chunks; begin += threads) {
      const int index = begin + thread, row = index / chunks, chunk = index % chunks;
      if (Tile::rows * chunks % threads != 0 && row >= Tile::rows) break;
      const bool exists = row < from.count && (dim == Tile::columns || chunk * 8 < dim);
      // The address of something that does not exist is never used: any valid one will do.
      const Element* source = exists ? from.data + row * from.stride + chunk * 8 : from.data;
      ptx::copy_async(address + Tile::offset(row, chunk), source, exists ? 16 : 0);
    }
  }
}

/// Writes `rows` rows of a tile to global memory, those that exist and the columns before `dim`.
template <int threads, int dim, int rows, typename Tile, typename Element>
__device__ __forceinline__ void store_tile(unsigned address, int first_row, const Rows<Element>& to, int thread) {
  constexpr int chunks = dim / 8;
#pragma unroll
  for (int begin = 0; begin < rows * chunks; begin += threads) {
    const int index = begin + thread, row = first_row + index / chunks, chunk = index % chunks;
    if (rows * chunks % threads != 0 && index >= rows * chunks) break;
    if (row >= to.count) continue;
    using Chunk = ptx::Vector<unsigned, 4>;
    const auto values = ptx::load_shared<Chunk>(address + Tile::offset(row, chunk));
    ptx::store_global(reinterpret_cast<Chunk*>(to.data + row * to.stride + chunk * 8), values);
  }
}

}  // namespace flash_attention::tile
