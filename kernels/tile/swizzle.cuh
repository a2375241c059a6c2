#pragma once

#include "tile/math.cuh"

// A tile of elements in shared memory, laid out so that ldmatrix and 16-byte copies meet no bank conflict.
//
// Columns are counted in 16 bits: a float takes two. They come in panels of 64, a row of a panel is 128 bytes: all 32
// banks. Its eight 16-byte chunks are permuted by the row, chunk c of row r is at place c ^ (r % 8), so that the same chunk
// of eight neighbouring rows, which ldmatrix reads at once, covers all banks:
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

  /// Where chunk `chunk` (16 bytes) of a row is, in bytes from the start.
  __device__ static constexpr unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(chunk / 8 * panel_bytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
  }

  /// From the address of an even chunk of the first panel (or of the chunk after it) to that `chunks` further on; `chunks`
  /// is even. The rows of an address never change its three chunk bits, so a step is one XOR, folded into the instruction
  /// where the loop is unrolled.
  __device__ static constexpr unsigned step(unsigned address, int chunks) {
    return (address ^ static_cast<unsigned>(chunks % 8 * 16)) + static_cast<unsigned>(chunks / 8 * panel_bytes);
  }
};

}  // namespace flash_attention::tile
