#pragma once

// mbarrier objects in shared memory: count arrivals and the bytes of asynchronous copies (PTX ISA 9.7.13.15).
//
// A phase completes when all expected arrivals and all expected bytes are in; its parity then flips. Waiting for parity p
// returns once the phase of that parity has completed, so the first wait of a reader is for parity 0, and the first wait
// of a writer, for stages that start out empty, is for parity 1.

#include "ptx/shared.cuh"

namespace flash_attention::ptx {

struct alignas(8) Mbarrier {
  unsigned long long state;
};

/// mbarrier.init (9.7.13.15.9). One thread, then mbarrier_init_fence and a barrier before anyone uses it.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/// fence.mbarrier_init (9.7.13.4): makes the initialisation visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// mbarrier.arrive (9.7.13.15.13): one arrival; what this thread did before is visible to those who wait.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// mbarrier.arrive.expect_tx (9.7.13.15.13): one arrival, and the phase also waits for that many bytes of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

/// mbarrier.test_wait.parity (9.7.13.15.16): whether the phase of that parity has completed; never waits.
__device__ __forceinline__ bool mbarrier_test(Mbarrier& barrier, int parity) {
  int done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

/// mbarrier.try_wait.parity in a loop: returns when the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace flash_attention::ptx
