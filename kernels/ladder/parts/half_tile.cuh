#pragma once

// Tiles of 16-bit elements in shared memory, for tensor cores: copied as they are, eight elements (16 bytes) at a time.

#include "ptx/memory.cuh"
#include "tile/sequence.cuh"

namespace flash_attention {

/// Loads rows of a tensor to shared memory. Rows that do not exist, and columns from head_dim on, become zero.
template <int threads, int dim, int rows, int columns, typename Element>
__device__ __forceinline__ void load_tile(Element (&to)[rows][columns], const tile::Rows<const Element>& from) {
  using Chunk = ptx::Vector<Element, 8>;
  constexpr int chunks = columns / 8;
  for (int index = threadIdx.x; index < rows * chunks; index += threads) {
    const int row = index / chunks, d = index % chunks * 8;
    Chunk values{};
    if (row < from.count && d < dim) values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from.row(row) + d));
    ptx::store_shared(ptx::shared_address(&to[row][d]), values);
  }
}

/// A tile of 16-bit elements in shared memory, row after row.
template <int num_rows, int num_columns>
struct PlainTile {
  static constexpr int rows = num_rows, columns = num_columns;
  alignas(16) unsigned char bytes[rows * columns * 2];

  /// The place of chunk `chunk` (eight elements) of a row, in bytes from the start.
  __device__ static constexpr unsigned offset(int row, int chunk) { return row * columns * 2 + chunk * 16; }
  /// From the address of a chunk to the one `chunks` chunks later.
  __device__ static constexpr unsigned step(unsigned address, int chunks) { return address + chunks * 16; }
};

/// Loads rows of a tensor to a tile of shared memory, by its address. The type of the tile knows the place of a chunk.
template <int threads, int dim, typename Tile, typename Element>
__device__ __forceinline__ void load_tile(unsigned address, const tile::Rows<const Element>& from, int thread) {
  using Chunk = ptx::Vector<Element, 8>;
  constexpr int chunks = Tile::columns / 8;
  for (int index = thread; index < Tile::rows * chunks; index += threads) {
    const int row = index / chunks, chunk = index % chunks;
    Chunk values{};
    if (row < from.count && chunk * 8 < dim) {
      values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from.row(row) + chunk * 8));
    }
    ptx::store_shared(address + Tile::offset(row, chunk), values);
  }
}

}  // namespace flash_attention
