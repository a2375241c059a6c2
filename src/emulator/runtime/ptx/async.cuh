#pragma once

// Emulated: kernels/ptx/async.cuh.

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace flash_attention::ptx {

inline void copy_async(unsigned shared, const void* global, int valid = 16) {
  emulator::table->copy_async(shared, global, 16, valid);
}

template <int bytes>
inline void copy_async_small(unsigned shared, const void* global, int valid = bytes) {
  static_assert(bytes == 4 || bytes == 8, "4 or 8 bytes; copy_async moves 16");
  emulator::table->copy_async(shared, global, bytes, valid);
}

inline void copy_async_commit() { emulator::table->copy_async_commit(); }

template <int pending>
inline void copy_async_wait() {
  emulator::table->copy_async_wait(pending);
}

inline void copy_async_arrive(Mbarrier& barrier) { emulator::table->copy_async_arrive(shared_address(&barrier)); }

}  // namespace flash_attention::ptx
