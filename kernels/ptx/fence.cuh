#pragma once

// Fences between the generic proxy (ordinary loads and stores) and the asynchronous proxy (TMA, wgmma operands).

namespace flash_attention::ptx {

/// fence.proxy.async.shared::cta (PTX ISA 9.7.13.4): this thread's earlier writes to shared memory are seen by later TMA
/// and wgmma reads. Every writer executes it, then a barrier tells the reader.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// fence.proxy.async.global: orders this thread's ordinary accesses to global memory and those of its bulk copies.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flash_attention::ptx
