#pragma once

// Emulated: kernels/ptx/shared.cuh.

namespace flash_attention::ptx {

template <typename Storage>
inline Storage& shared_storage() {
  if (sizeof(Storage) > emulator::thread->shared_bytes) {
    emulator::table->fail("shared_storage is larger than the shared memory the block was launched with");
  }
  return *reinterpret_cast<Storage*>(emulator::thread->shared);
}

inline unsigned shared_address(const void* pointer) { return emulator::table->shared_address(pointer); }

}  // namespace flash_attention::ptx
