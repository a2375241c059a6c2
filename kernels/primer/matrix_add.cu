// matrix_add: C = A + B for matrices, with blocks and grids of two dimensions; and the same with the two axes exchanged.
//
// The idea:        threads in the shape of the data: x along a row, where memory is contiguous, y from row to row.
// Launch shape:    blocks of 32 x 8 threads, one thread an element, a grid of columns / 32 by rows / 8, rounded up.
// What it moves:   12 bytes an element, in either version. But the second touches 32 sectors where the first touches 4.
// What limits it:  the first: DRAM, like vector_add_simple. The second: sectors fetched for 4 of their 32 bytes.
//
// Build and run:   nvcc -O3 -std=c++17 -I.. -o matrix_add matrix_add.cu && ./matrix_add

// Memory has one dimension, so a matrix is stored row after row (row-major): element (row, column) is at
// row * columns + column. One step in `column` is the next float; one step in `row` is a jump of a whole row.
//
// A block of two dimensions is still cut into warps of 32 threads, and x counts fastest. With blocks of 32 x 8, a warp is
// one value of threadIdx.y and all 32 of threadIdx.x:
//
//     threadIdx.x     0  1  2  ...  31
//     threadIdx.y 0   |--- warp 0 ---|
//                 1   |--- warp 1 ---|
//                 ...
//                 7   |--- warp 7 ---|
//
// So `column` follows threadIdx.x, and a warp's request is 32 neighbours of one row: 4 sectors.
__global__ void matrix_add(const float* A, const float* B, float* C, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;                        // tails on both sides
  const long long i = static_cast<long long>(row) * columns + column;  // 64 bits before the product, not after it
  C[i] = A[i] + B[i];
}

// The same sum with the axes exchanged: `row` follows threadIdx.x. The result is the same. But the 32 threads of a warp are
// now in 32 rows of one column, and every request touches 32 sectors to use 4 bytes of each: 8 times the
// traffic, as far as the caches do not keep the rest of a sector until the neighbouring column is read.
//
// No compiler warns of it and no test fails. A profiler shows it (sectors per request), and so does the emulator.
__global__ void matrix_add_by_columns(const float* A, const float* B, float* C, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;
  const long long i = static_cast<long long>(row) * columns + column;
  C[i] = A[i] + B[i];
}

#ifdef __NVCC__  // The host's side, in full. `flash-attention primer` has its own and compiles only the lines above.

#include <cstdio>
#include <vector>

#include "primer/check.cuh"

unsigned ceil_div(int a, int b) { return (a + b - 1) / b; }

int main() {
  const int rows = 8191, columns = 8200;
  const long long n = static_cast<long long>(rows) * columns;
  const size_t bytes = n * sizeof(float);
  std::vector<float> A(n), B(n), C(n);
  for (long long i = 0; i < n; ++i) A[i] = 0.5f * (i % 1000), B[i] = 3.0f * (i % 7);

  float *A_gpu, *B_gpu, *C_gpu;
  check(cudaMalloc(&A_gpu, bytes));
  check(cudaMalloc(&B_gpu, bytes));
  check(cudaMalloc(&C_gpu, bytes));
  check(cudaMemcpy(A_gpu, A.data(), bytes, cudaMemcpyHostToDevice));
  check(cudaMemcpy(B_gpu, B.data(), bytes, cudaMemcpyHostToDevice));

  // dim3 is a triple of sizes; what is not given is 1. Grids of y and z are limited to 65535, those of x to 2^31 - 1.
  const dim3 block(32, 8);
  const dim3 by_rows(ceil_div(columns, 32), ceil_div(rows, 8));
  const dim3 by_columns(ceil_div(rows, 32), ceil_div(columns, 8));

  long long wrong = 0;
  for (const bool good : {true, false}) {
    check(cudaMemset(C_gpu, 0, bytes));  // so that the first result is not taken for the second
    if (good)
      matrix_add<<<by_rows, block>>>(A_gpu, B_gpu, C_gpu, rows, columns);
    else
      matrix_add_by_columns<<<by_columns, block>>>(A_gpu, B_gpu, C_gpu, rows, columns);
    check(cudaGetLastError());
    check(cudaMemcpy(C.data(), C_gpu, bytes, cudaMemcpyDeviceToHost));
    for (long long i = 0; i < n; ++i) wrong += C[i] != A[i] + B[i];
  }
  std::printf("matrix_add: %d x %d elements, both ways, %lld wrong\n", rows, columns, wrong);

  check(cudaFree(A_gpu));
  check(cudaFree(B_gpu));
  check(cudaFree(C_gpu));
  return wrong == 0 ? 0 : 1;
}

#endif
