#pragma once

// Measuring inside a block.

#include "abi/args.h"
#include "ptx/barrier.cuh"
#include "ptx/clock.cuh"
#include "ptx/fence.cuh"
#include "ptx/shared.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::micro {

/// Starts when all threads have arrived. stop() writes the cycles until all have arrived again.
struct Clock {
  unsigned long long* result;
  unsigned long long start;

  __device__ __forceinline__ explicit Clock(const abi::AttentionArgs& args)
      : result(static_cast<unsigned long long*>(args.workspace) + blockIdx.x) {
    __syncthreads();
    start = ptx::clock();
  }
  __device__ __forceinline__ void stop() const {
    __syncthreads();
    if (threadIdx.x == 0) *result = ptx::clock() - start;
  }
};

/// Does nothing. But the compiler takes the values for used, so it must compute them.
template <int count>
__device__ __forceinline__ void keep(const abi::AttentionArgs& args, const float (&values)[count]) {
  float sum = 0;
  for (float value : values) sum += value;
  if (sum == 1.2345f) *static_cast<float*>(args.workspace) = sum;
}

}  // namespace flash_attention::micro
