#pragma once

// Named barriers of a block, 0..15. __syncthreads uses barrier 0 (PTX ISA 9.7.13.1, barrier).

namespace flash_attention::ptx {

/// bar.sync: waits until `threads` threads (whole warps) have arrived at barrier `id`, by sync or by arrive.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// barrier.sync: the same for warps that reach it at different places of the program. bar.sync needs one place for all.
__device__ __forceinline__ void barrier_sync_apart(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// bar.arrive: arrives without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_attention::ptx
