#pragma once

// Thread block clusters (PTX ISA 9.7.13.3, barrier.cluster; 10.13, %cluster_ctarank; 9.7.9.23, mapa).

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace flash_attention::ptx {

/// This block's rank in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// barrier.cluster.arrive.release: this thread arrives; its earlier writes are visible to threads that wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

/// barrier.cluster.arrive.relaxed: this thread arrives, and has written nothing that other threads must see.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// barrier.cluster.wait.acquire: waits until every thread of the cluster has arrived.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// mapa: the address, in the block of that rank, of what this block has at `shared`.
__device__ __forceinline__ unsigned cluster_address(const void* shared, unsigned rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

/// ld.shared::cluster.u32, by cluster_address.
__device__ __forceinline__ unsigned cluster_load_word(unsigned address) {
  unsigned value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

/// st.async (9.7.9.12): stores to another block's shared memory, by cluster_address. An mbarrier of that block counts
/// the bytes, and threads that wait for its phase see them. Unlike an arrival with release, it does not wait for other
/// memory accesses.
__device__ __forceinline__ void cluster_store_async(unsigned address, const Vector<float, 4>& four, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
               "r"(barrier), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
}
__device__ __forceinline__ void cluster_store_async(unsigned address, const Vector<float, 2>& pair, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(address),
               "r"(barrier), "f"(pair[0]), "f"(pair[1])
               : "memory");
}

/// mbarrier.arrive.release.cluster: one arrival at the mbarrier of another block, by cluster_address.
__device__ __forceinline__ void cluster_mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive, by cluster_address, for a stage that has been read and not written: it only arrives.
/// cluster_mbarrier_arrive also makes writes visible to the other block; for that it waits for all memory accesses,
/// which takes longer than a stage's products.
__device__ __forceinline__ void cluster_mbarrier_arrive_read(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.try_wait.parity.acquire.cluster in a loop: what other blocks did before they arrived is visible.
__device__ __forceinline__ void cluster_mbarrier_wait(Mbarrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace flash_attention::ptx
