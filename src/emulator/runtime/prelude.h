#pragma once

// Included before every emulated unit: everything that nvcc and NVRTC know without an include.

#include "interface.h"
#include "vector_types.h"

#define __device__
#define __host__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace flash_attention::emulator {

/// The library sets it when it loads the unit, and before a thread runs.
inline const Table* table = nullptr;
inline thread_local const ThreadView* thread = nullptr;

// Code that runs before the kernel is not counted as its accesses: runtime/plain_access.h.

template <typename Argument>
[[gnu::no_sanitize_address]] void call(void (*kernel)(Argument), const void* argument) {
  kernel(*static_cast<const Argument*>(argument));
}

/// Calls a kernel with a list of parameters, in the form of CUDA's launch: an array of pointers to them.
template <typename... Parameters>
[[gnu::no_sanitize_address]] void call_plain(void (*kernel)(Parameters...), void* const* parameters) {
  struct Call {
    [[gnu::no_sanitize_address]] Call(void (*kernel)(Parameters...), Parameters... values) { kernel(values...); }
  };
  Call{kernel, *static_cast<Parameters*>(*parameters++)...};  // braces: evaluated from left to right
}

}  // namespace flash_attention::emulator

#define threadIdx (flash_attention::emulator::thread->thread)
#define blockIdx (flash_attention::emulator::thread->block)
#define blockDim (flash_attention::emulator::thread->block_dim)
#define gridDim (flash_attention::emulator::thread->grid_dim)

inline void __syncthreads() { flash_attention::emulator::table->barrier(0, 0, true); }
inline void __syncwarp() { flash_attention::emulator::table->warp(flash_attention::emulator::WarpOp::sync, nullptr); }
