// vector_add: c = a + b again, four elements an access and a grid that fits the GPU.
//
// The idea:        a thread moves 16 bytes at a time (float4), and goes over the vector in steps of the whole grid.
// Launch shape:    as many blocks as the GPU holds at once, whatever n is: 2048 threads for each SM.
// What it moves:   the same 12 bytes an element, with a quarter of the memory instructions.
// What limits it:  DRAM. The time of a kernel like this is bytes / bandwidth; the rest is overhead to be made small.
//
// Build and run:   nvcc -O3 -std=c++17 -I.. -o vector_add vector_add.cu && ./vector_add

// A warp's float4 request covers 32 * 16 = 512 bytes: 16 sectors requested by one instruction. More bytes in flight for
// each instruction is what hides the latency of DRAM (hundreds of cycles).
//
// The loop is called grid-stride: with T threads in the grid, thread t takes groups t, t + T, t + 2T, ... In each step,
// neighbouring threads still touch neighbouring addresses:
//
//     group     0   1   2  ...  T-1 | T  T+1 ...      2T-1 | 2T ...
//     thread    0   1   2  ...  T-1 | 0   1  ...       T-1 | 0  ...
//
// A thread that took a separate run instead (t * n / T up to (t + 1) * n / T) would be the natural choice on a CPU, and
// the wrong one here: the 32 threads of a warp would ask for 32 far-apart sectors in every step.
//
// `__restrict__` promises that c overlaps neither input, so loads of the next step may move before the store of this one.
__global__ void vector_add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, long long n) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long num_threads = static_cast<long long>(gridDim.x) * blockDim.x;

  // cudaMalloc gives addresses that are multiples of 256, so every group of four starts at a multiple of 16 bytes, which a
  // 16-byte access needs.
  const long long num_groups = n / 4;
  for (long long i = thread; i < num_groups; i += num_threads) {
    const float4 x = reinterpret_cast<const float4*>(a)[i];
    const float4 y = reinterpret_cast<const float4*>(b)[i];
    reinterpret_cast<float4*>(c)[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }

  const long long tail = 4 * num_groups + thread;  // at most three elements are left
  if (tail < n) c[tail] = a[tail] + b[tail];
}

#ifdef __NVCC__  // The host's side, in full. `flash-attention primer` has its own and compiles only the lines above.

#include <cstdio>
#include <vector>

#include "primer/check.cuh"

int main() {
  const long long n = (1 << 26) + 3;  // 256 MiB a vector: five times the L2 cache of an H200, so that DRAM is measured
  const size_t bytes = n * sizeof(float);
  std::vector<float> a(n), b(n), c(n);
  for (long long i = 0; i < n; ++i) a[i] = 0.5f * (i % 1000), b[i] = 3.0f * (i % 7);

  float *a_gpu, *b_gpu, *c_gpu;
  check(cudaMalloc(&a_gpu, bytes));
  check(cudaMalloc(&b_gpu, bytes));
  check(cudaMalloc(&c_gpu, bytes));
  check(cudaMemcpy(a_gpu, a.data(), bytes, cudaMemcpyHostToDevice));
  check(cudaMemcpy(b_gpu, b.data(), bytes, cudaMemcpyHostToDevice));

  int num_sms;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  const int threads = 256;
  const int blocks = num_sms * (2048 / threads);

  // Time is taken on the GPU, by two marks in its queue: a launch returns long before the kernel has run. The first launch
  // also loads the code and is left out.
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  vector_add<<<blocks, threads>>>(a_gpu, b_gpu, c_gpu, n);
  const int repeats = 20;
  check(cudaEventRecord(start));
  for (int i = 0; i < repeats; ++i) vector_add<<<blocks, threads>>>(a_gpu, b_gpu, c_gpu, n);
  check(cudaEventRecord(stop));
  check(cudaEventSynchronize(stop));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start, stop));

  check(cudaMemcpy(c.data(), c_gpu, bytes, cudaMemcpyDeviceToHost));
  long long wrong = 0;
  for (long long i = 0; i < n; ++i) wrong += c[i] != a[i] + b[i];
  std::printf("vector_add: %lld elements, %lld wrong, %.0f GB/s\n", n, wrong, 3e-6 * bytes * repeats / milliseconds);

  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  check(cudaFree(a_gpu));
  check(cudaFree(b_gpu));
  check(cudaFree(c_gpu));
  return wrong == 0 ? 0 : 1;
}

#endif
