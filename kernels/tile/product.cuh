#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/key_source.cuh"

// Products of 64 x 64 score tiles on CUDA cores, for a block of 256 threads.
//
// Threads form a 16 x 16 grid. Thread (y, x) = (thread / 16, thread % 16) holds rows 4y .. 4y+3 and columns 4x .. 4x+3 of
// each 64-column panel of a result, so that a step along the contracted axis reads two groups of four from shared memory
// and does sixteen multiply-adds. A row of a result is in the sixteen lanes of half a warp.

namespace flash_attention::tile {

constexpr int block_rows = 64;  // both sides of a score tile
constexpr int product_threads = 256;
constexpr int dot_depth = 32;  // head_dim elements of a chunk of a dot product
constexpr int padded_rows = block_rows + 4;

/// Rows of a chunk of a weighted sum: few enough that it needs no more memory than the chunks of a dot product.
__device__ constexpr int panel_depth(int dim) { return dim <= 256 ? 16 : dim <= 512 ? 8 : 4; }

/// Columns of a result of `dim` columns that a thread holds.
__device__ constexpr int columns_per_thread(int dim) { return round_up(dim, 64) / 16; }

template <int dim>
struct ProductStorage {
  static constexpr int panel_rows = panel_depth(dim);
  union {
    struct {
      float A[dot_depth][padded_rows];
      float B[dot_depth][padded_rows];
    } dot;  // transposed, so that a thread's four rows are neighbours
    float panel[panel_rows][round_up(dim, 64)];
  };
};

/// A score tile in shared memory, indexed [contracted axis][row of the result].
struct WeightTile {
  alignas(16) float at[block_rows][padded_rows];
};

/// A weight that does not exist: a NaN with a special payload. Its product is never added, so a NaN or Inf that a mask
/// hides does not reach the sum. A weight that is zero or NaN by arithmetic is multiplied as usual.
constexpr unsigned hidden_bits = 0x7fc0a77eu;
__device__ __forceinline__ float hidden() { return __builtin_bit_cast(float, hidden_bits); }
__device__ __forceinline__ bool is_hidden(float weight) { return __builtin_bit_cast(unsigned, weight) == hidden_bits; }

struct ThreadPlace {
  int row;     // first of four
  int column;  // first of four, in each panel

  __device__ __forceinline__ ThreadPlace()
      : row(static_cast<int>(threadIdx.x) / 16 * 4), column(static_cast<int>(threadIdx.x) % 16 * 4) {}
};

/// Loads columns [column, column + depth) of 64 rows, transposed. Rows and columns that do not exist become zero.
template <int dim, typename Source>
__device__ __forceinline__ void load_transposed(float (&to)[dot_depth][padded_rows], const Source& rows, int column,
                                                int depth, bool by_four) {
  for (int group = threadIdx.x; group < block_rows * depth / 4; group += product_threads) {
    const int row = group % block_rows, first = group / block_rows * 4;
    Four values{};
    if constexpr (dim % 8 == 0) {
      if (row < rows.count) values = load_four(rows.row(row) + column + first, by_four);
    } else {
      if (row < rows.count) values = load_four_of<dim>(rows.row(row), column + first, by_four);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) to[first + c][row] = values[c];
  }
}

/// C += A B^T, where A and B are 64 rows of `dim` elements each.
template <int dim, typename SourceA, typename SourceB, typename Storage>
__device__ __forceinline__ void add_dot_products(float (&C)[4][4], const SourceA& A, const SourceB& B, Storage& storage) {
  const ThreadPlace place;
  const bool A_by_four = rows_move_by_four(A), B_by_four = rows_move_by_four(B);
#pragma unroll 1
  for (int column = 0; column < dim; column += dot_depth) {
    const int depth = min(dot_depth, round_up(dim, 8) - column);
    __syncthreads();  // the storage's previous content has been read
    load_transposed<dim>(storage.dot.A, A, column, depth, A_by_four);
    load_transposed<dim>(storage.dot.B, B, column, depth, B_by_four);
    __syncthreads();  // the chunk is ready for all threads
    // Four products are added first, then their sum: this halves the rounding error of one long chain if a few products
    // dominate.
#pragma unroll 1
    for (int begin = 0; begin < depth; begin += 8) {
      float sum[4][4]{};
#pragma unroll 4
      for (int d = begin; d < begin + 8; ++d) {
        const auto a = *reinterpret_cast<const Four*>(&storage.dot.A[d][place.row]);
        const auto b = *reinterpret_cast<const Four*>(&storage.dot.B[d][place.column]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[r][c] += a[r] * b[c];
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) C[r][c] += sum[r][c];
      }
    }
  }
}

/// C += W^T B, where W is a tile of weights [64][row of C] and B is 64 rows of `dim` elements. With `hides`, hidden weights
/// are skipped. Begins with a barrier, so the caller may have just written W.
template <int dim, bool hides, int columns, typename Source, typename Storage>
__device__ __forceinline__ void add_weighted_rows(float (&C)[4][columns], const WeightTile& W, const Source& B,
                                                  Storage& storage) {
  constexpr int width = round_up(dim, 64), chunk = Storage::panel_rows;
  static_assert(columns == columns_per_thread(dim));
  const ThreadPlace place;
  const bool by_four = rows_move_by_four(B);
#pragma unroll 1
  for (int begin = 0; begin < min(block_rows, B.count); begin += chunk) {
    __syncthreads();  // the weights are written, the storage's previous content has been read
    for (int group = threadIdx.x; group < chunk * width / 4; group += product_threads) {
      const int row = group / (width / 4), column = group % (width / 4) * 4;
      Four values{};
      if (begin + row < B.count && column < dim) {
        values = load_four_of<dim>(B.row(begin + row), column, by_four);
      }
      *reinterpret_cast<Four*>(&storage.panel[row][column]) = values;
    }
    __syncthreads();  // the panel is ready for all threads
#pragma unroll(columns >= 16 ? 2 : 4)
    for (int k = 0; k < chunk; ++k) {
      const auto weight = *reinterpret_cast<const Four*>(&W.at[begin + k][place.row]);
#pragma unroll
      for (int panel = 0; panel < width / 64; ++panel) {
        const auto b = *reinterpret_cast<const Four*>(&storage.panel[k][64 * panel + place.column]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (hides && is_hidden(weight[r])) continue;
#pragma unroll
          for (int c = 0; c < 4; ++c) C[r][4 * panel + c] += weight[r] * b[c];
        }
      }
    }
  }
}

/// The same as add_weighted_rows. It tests for hidden weights only if the tile has some.
template <int dim, int columns, typename Source, typename Storage>
__device__ __forceinline__ void add_weighted_rows(float (&C)[4][columns], const WeightTile& W, const Source& B,
                                                  Storage& storage, bool some_hidden) {
  if (some_hidden) {
    add_weighted_rows<dim, true>(C, W, B, storage);
  } else {
    add_weighted_rows<dim, false>(C, W, B, storage);
  }
}

/// W[column][row] = weights of the thread, for a product whose rows are the rows of the score tile.
__device__ __forceinline__ void store_weights_by_column(WeightTile& W, const float (&weights)[4][4]) {
  const ThreadPlace place;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const Four values{{weights[0][c], weights[1][c], weights[2][c], weights[3][c]}};
    *reinterpret_cast<Four*>(&W.at[place.column + c][place.row]) = values;
  }
}

/// W[row][column], for a product whose rows are the columns of the score tile.
__device__ __forceinline__ void store_weights_by_row(WeightTile& W, const float (&weights)[4][4]) {
  const ThreadPlace place;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const Four values{{weights[r][0], weights[r][1], weights[r][2], weights[r][3]}};
    *reinterpret_cast<Four*>(&W.at[place.row + r][place.column]) = values;
  }
}

/// Writes the thread's part of 64 rows of `dim` elements, each row times its factor. Rows that do not exist are left
/// out.
template <int dim, int columns, typename Element>
__device__ __forceinline__ void store_rows(const Rows<Element>& rows, const float (&C)[4][columns],
                                           const float (&factor)[4]) {
  const ThreadPlace place;
  const bool by_four = rows_move_by_four(rows);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (place.row + r >= rows.count) continue;
#pragma unroll
    for (int panel = 0; panel < columns / 4; ++panel) {
      const int column = 64 * panel + place.column;
      if (column >= dim) continue;
      Four values;
#pragma unroll
      for (int c = 0; c < 4; ++c) values[c] = C[r][4 * panel + c] * factor[r];
      store_four_of<dim>(rows.data + (place.row + r) * rows.stride, column, values, by_four);
    }
  }
}

/// Combines the values of the sixteen lanes that share a row.
template <typename Combine>
__device__ __forceinline__ float reduce_row(float value, Combine combine) {
#pragma unroll
  for (int lane_mask = 1; lane_mask < 16; lane_mask *= 2) value = combine(value, ptx::shuffle_xor(value, lane_mask));
  return value;
}
__device__ __forceinline__ float row_maximum(float value) {
  return reduce_row(value, [](float a, float b) { return ptx::max(a, b); });
}
__device__ __forceinline__ float row_total(float value) {
  return reduce_row(value, [](float a, float b) { return a + b; });
}

}  // namespace flash_attention::tile
