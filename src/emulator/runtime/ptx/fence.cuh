#pragma once

// Emulated: kernels/ptx/fence.cuh.

namespace flash_attention::ptx {

inline void fence_async_shared() { emulator::table->fence_proxy_async(); }

inline void fence_async_global() { emulator::table->fence_proxy_async(); }

inline void fence_grid() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace flash_attention::ptx
