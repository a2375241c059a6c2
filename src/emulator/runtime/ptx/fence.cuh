#pragma once

// Emulated: kernels/ptx/fence.cuh.

namespace flash_attention::ptx {

inline void fence_async_shared() { emulator::table->fence_proxy_async(); }

inline void fence_async_global() { emulator::table->fence_proxy_async(); }

}  // namespace flash_attention::ptx
