#pragma once

// A tile of codes of 4 bits in shared memory.

namespace flash_attention::decode {

/// Rows of codes, one after the other. Chunks of 16 bytes are permuted by the row, so that the same chunk of eight
/// neighbouring rows, or all chunks of neighbouring rows, cover all banks. A column is 16 bits, as in SwizzledTile.
template <int num_rows, int num_columns>
struct CodeTile {
  static constexpr int rows = num_rows, columns = num_columns, row_bytes = 2 * num_columns;
  static constexpr int panels = 1, panel_bytes = rows * row_bytes;
  static constexpr int swizzle = row_bytes % 128 == 0 ? 8 : row_bytes % 64 == 0 ? 4 : 2;  // chunks that change places
  static_assert(row_bytes % 32 == 0 && row_bytes <= 128);

  alignas(128) unsigned char bytes[panel_bytes];

  __device__ static constexpr unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(row * row_bytes + (chunk ^ row / (8 / swizzle) % swizzle) * 16);
  }
};

/// Q for turned products (turned.cuh): 16 bytes for each lane and word of its codes of a key, 8 rows at a time.
template <int num_rows, int num_words>
struct CodeQueries {
  static constexpr int rows = num_rows;

  alignas(16) unsigned words[num_rows / 8][num_words][32][4];
};

}  // namespace flash_attention::decode
