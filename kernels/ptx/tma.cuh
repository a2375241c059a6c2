#pragma once

// The tensor memory accelerator: boxes of a tensor to and from shared memory, asynchronously (PTX ISA 9.7.9.25-27).
// One thread issues. Tensor coordinates are innermost first; elements outside the tensor read as zero and still count as
// bytes, and are not written by a store.

#include "abi/args.h"
#include "ptx/mbarrier.cuh"

namespace flash_attention::ptx {

/// prefetch.tensormap: fetches the descriptor before the first copy needs it.
__device__ __forceinline__ void tma_prefetch(const abi::TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// cp.async.bulk.tensor, global to shared. Adds the box's bytes to `barrier` when they have landed.
__device__ __forceinline__ void tma_load_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, int x0, int x1,
                                            int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, int x0, int x1,
                                            int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// createpolicy: data that is loaded with it leaves L2 first.
__device__ __forceinline__ unsigned long long l2_evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// The same with such a policy.
__device__ __forceinline__ void tma_load_policy_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier,
                                                   unsigned long long policy, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%4, %5, %6, "
      "%7}], [%2], %3;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "l"(policy), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

/// The same with .multicast::cluster: the box and the signal arrive at the same offsets in every block of the cluster whose
/// bit is set in `blocks`.
__device__ __forceinline__ void tma_multicast_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier,
                                                 unsigned short blocks, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, "
      "%6, %7}], [%2], %3;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

__device__ __forceinline__ void tma_multicast_5d(void* shared, const abi::TensorMap& map, Mbarrier& barrier,
                                                 unsigned short blocks, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, "
      "%6, %7, %8}], [%2], %3;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// cp.async.bulk.prefetch.tensor: prefetches the box to L2.
__device__ __forceinline__ void tma_prefetch_4d(const abi::TensorMap& map, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3)
               : "memory");
}

/// cp.async.bulk.tensor, shared to global. Joins this thread's open bulk group.
__device__ __forceinline__ void tma_store_4d(const abi::TensorMap& map, const void* shared, int x0, int x1, int x2,
                                             int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

__device__ __forceinline__ void tma_store_5d(const abi::TensorMap& map, const void* shared, int x0, int x1, int x2, int x3,
                                             int x4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

/// cp.async.bulk, global to shared: a run of bytes, a multiple of 16, both ends 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

/// cp.async.bulk, shared to global: a run of bytes. Joins this thread's open bulk group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

/// cp.reduce.async.bulk.add.f32, shared to global: each float is added atomically. Joins the open bulk group.
__device__ __forceinline__ void bulk_reduce_add(float* global, const void* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

/// The same for sums that should stay in L2 the longest.
__device__ __forceinline__ void bulk_reduce_add_kept(float* global, const void* shared, int bytes) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes), "l"(policy)
      : "memory");
}

/// cp.async.bulk.commit_group: closes this thread's open bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// cp.async.bulk.wait_group.read: waits until all but the latest `pending` groups have read their shared memory, which
/// may then be reused.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/// cp.async.bulk.wait_group: waits until all but the latest `pending` groups are complete and their writes visible to
/// this thread.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace flash_attention::ptx
