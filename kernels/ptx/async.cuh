#pragma once

// cp.async (sm_80): a thread's copies from global to shared memory, in groups (PTX ISA 9.7.9.25.3).

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace flash_attention::ptx {

/// cp.async.cg, 16 bytes through L2 only. The bytes past `valid` (0 to 16) become zero and are not read.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, int valid = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

/// cp.async.ca, 4 or 8 bytes through L1 as well; the bytes past `valid` become zero.
template <int bytes>
__device__ __forceinline__ void copy_async_small(unsigned shared, const void* global, int valid = bytes) {
  static_assert(bytes == 4 || bytes == 8, "4 or 8 bytes; copy_async moves 16");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(bytes), "r"(valid)
               : "memory");
}

/// cp.async.commit_group: closes this thread's open group of copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// cp.async.wait_group: waits until this thread's copies have landed, except those of its latest `pending` groups.
/// Other threads see them after a barrier.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// cp.async.mbarrier.arrive.noinc (9.7.13.15.16): one arrival when all earlier copies of this thread have landed, of those
/// that the mbarrier expects. Nobody waits; threads that wait for the phase see the copies. It says nothing of stores.
__device__ __forceinline__ void copy_async_arrive(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

}  // namespace flash_attention::ptx
