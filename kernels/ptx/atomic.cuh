#pragma once

// Atomic additions and the loads and stores that order blocks of a grid (PTX ISA 9.7.13.6 atom, 9.7.13.7 red, 9.7.9 ld/st).

#include "ptx/memory.cuh"

namespace flash_attention::ptx {

/// red.global.add.f32: adds without giving back the old value.
__device__ __forceinline__ void reduce_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

/// red.global.add.v4.f32 (one instruction on sm_90, four before): adds to four neighbours, 16-byte aligned. Each
/// addition is atomic, the group is not.
__device__ __forceinline__ void reduce_add(float* address, const Vector<float, 4>& values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) reduce_add(address + i, values[i]);
#endif
}

/// red.global.max.u32.
__device__ __forceinline__ void reduce_max(unsigned* address, unsigned value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// red.global.max.s32.
__device__ __forceinline__ void reduce_max(int* address, int value) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// red.global.min.u32.
__device__ __forceinline__ void reduce_min(unsigned* address, unsigned value) {
  asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// red.global.add.u64.
__device__ __forceinline__ void reduce_add(long long* address, long long value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// atom.global.add: gives back the old value. Orders nothing.
__device__ __forceinline__ unsigned atomic_add(unsigned* address, unsigned value) {
  unsigned old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

/// atom.global.acq_rel.add: a thread that sees the new value also sees what this thread wrote before, and the other way
/// round.
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* address, unsigned value) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

/// The same on 64 bits.
__device__ __forceinline__ unsigned long long atomic_add_acq_rel(unsigned long long* address, unsigned long long value) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}

/// atom.global.cas: stores `value` where `expected` is found; gives back what was found. Orders nothing.
__device__ __forceinline__ unsigned long long compare_exchange(unsigned long long* address, unsigned long long expected,
                                                               unsigned long long value) {
  unsigned long long old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return old;
}

/// ld.relaxed.gpu: reads what other blocks have written, without an order.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

/// ld.acquire.gpu: later reads see what was written before the release that stored this value.
__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// st.release.gpu: earlier writes are visible to every thread that acquires this value.
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace flash_attention::ptx
