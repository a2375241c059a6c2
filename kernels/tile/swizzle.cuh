#pragma once

#include "tile/math.cuh"

// A tile of elements in shared memory, in a layout in which ldmatrix and 16-byte copies have no bank conflicts.
//
// Columns are counted in 16 bits: a float takes two. A panel is 64 columns, so a row of a panel is 128 bytes and covers
// all 32 banks. Its eight 16-byte chunks are permuted by the row: chunk c of row r is at place c ^ (r % 8). So the same
// chunk of eight neighbouring rows, which ldmatrix reads together, covers all banks:
//
//   row 0:  0 1 2 3 4 5 6 7
//   row 1:  1 0 3 2 5 4 7 6
//   row 2:  2 3 0 1 6 7 4 5   ...
//
// This is also the 128-byte swizzle of TMA and wgmma.

namespace flash_attention::tile {

template <int num_rows, int num_columns>
struct SwizzledTile {
  static constexpr int rows = num_rows;
  static constexpr int columns = num_columns;
  static constexpr int panels = ceil_div(num_columns, 64);
  static constexpr int panel_bytes = num_rows * 128;

  /// Elements of a chunk.
  template <typename Element>
  static constexpr int per_chunk = 16 / static_cast<int>(sizeof(Element));

  alignas(1024) unsigned char bytes[panels * panel_bytes];

  /// The place of chunk `chunk` (16 bytes) of a row, in bytes from the start of the tile.
  __device__ static constexpr unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * panel_bytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
  }

  /// From the address of an even chunk of the first panel (or of the chunk after it) to the one `chunks` chunks later;
  /// `chunks` is even, or the address that of the first chunk. The rows in an address never change its three chunk bits, so
  /// a step is one XOR. In an unrolled loop it is part of the instruction's address.
  __device__ static constexpr unsigned step(unsigned address, int chunks) {
    return (address ^ static_cast<unsigned>(chunks % 8 * 16)) + static_cast<unsigned>(chunks / 8 * panel_bytes);
  }
};

}  // namespace flash_attention::tile
