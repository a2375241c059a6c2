#pragma once

// Thread block clusters (PTX ISA 9.7.13.3, barrier.cluster; 10.13, %cluster_ctarank).

namespace flash_attention::ptx {

/// This block's rank in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// barrier.cluster.arrive.release: this thread has come; its earlier writes are visible to those who wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

/// barrier.cluster.wait.acquire: until every thread of the cluster has come.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace flash_attention::ptx
