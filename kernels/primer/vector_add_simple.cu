// vector_add_simple: c = a + b, one thread an element.
//
// The idea:        a loop over i becomes as many threads as i has values; each finds its own i and does one step.
// Launch shape:    n / 256 blocks of 256 threads, rounded up.
// What it moves:   two floats in, one out: 12 bytes for one addition. Only memory counts here.
// What limits it:  each thread does so little that starting it and finding i cost as much as the work.
//
// Build and run:   nvcc -O3 -std=c++17 -I.. -o vector_add_simple vector_add_simple.cu && ./vector_add_simple

// A kernel: `__global__` says that the GPU runs it and the host starts it. Every thread runs the same text. What tells one
// thread from another are two built-in indices:
//
//     blockIdx.x      0                          1                          2
//     threadIdx.x     0 1 2 ... 255              0 1 2 ... 255              0 1 2 ... 255
//     i               0 1 2 ... 255              256 257 ... 511            512 513 ... 767
//
// A block is a group of threads that live on the same multiprocessor (SM). The GPU hands out blocks to SMs in any order, so
// no thread may count on another block having run. Within a block, 32 neighbouring threads form a warp: they execute one
// instruction together. `a[i]` of a warp is one request for 32 neighbouring floats: 128 bytes, four 32-byte sectors, and no
// byte of them is wasted. That is a coalesced access, and the reason why i grows by one from thread to thread.
__global__ void vector_add_simple(const float* a, const float* b, float* c, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 64 bits: n may exceed 2^31
  if (i < n) c[i] = a[i] + b[i];  // the last block reaches past the end when n is no multiple of 256
}

#ifdef __NVCC__  // The host's side, in full. `flash-attention primer` has its own and compiles only the lines above.

#include <cstdio>
#include <vector>

#include "primer/check.cuh"

int main() {
  const long long n = (1 << 24) + 5;  // no multiple of 256, so that the `if` above has work to do
  const size_t bytes = n * sizeof(float);
  std::vector<float> a(n), b(n), c(n);
  for (long long i = 0; i < n; ++i) a[i] = 0.5f * (i % 1000), b[i] = 3.0f * (i % 7);

  // 1. Allocate. The GPU has its own memory; these pointers mean nothing to the host.
  float *a_gpu, *b_gpu, *c_gpu;
  check(cudaMalloc(&a_gpu, bytes));
  check(cudaMalloc(&b_gpu, bytes));
  check(cudaMalloc(&c_gpu, bytes));

  // 2. Copy the inputs over.
  check(cudaMemcpy(a_gpu, a.data(), bytes, cudaMemcpyHostToDevice));
  check(cudaMemcpy(b_gpu, b.data(), bytes, cudaMemcpyHostToDevice));

  // 3. Launch: <<<blocks, threads of a block>>>. It returns at once; the GPU works meanwhile.
  const int threads = 256;
  const long long blocks = (n + threads - 1) / threads;
  vector_add_simple<<<blocks, threads>>>(a_gpu, b_gpu, c_gpu, n);
  check(cudaGetLastError());  // a launch returns nothing: this is how to ask whether it was accepted

  // 4. Copy the result back. This waits for the kernel.
  check(cudaMemcpy(c.data(), c_gpu, bytes, cudaMemcpyDeviceToHost));

  // 5. Check. One float addition is rounded the same way on both sides, so the bits must agree.
  long long wrong = 0;
  for (long long i = 0; i < n; ++i) wrong += c[i] != a[i] + b[i];
  std::printf("vector_add_simple: %lld elements, %lld wrong\n", n, wrong);

  // 6. Free.
  check(cudaFree(a_gpu));
  check(cudaFree(b_gpu));
  check(cudaFree(c_gpu));
  return wrong == 0 ? 0 : 1;
}

#endif
