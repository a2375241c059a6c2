#pragma once

// Emulated: kernels/ptx/memory.cuh.

#include "ptx/shared.cuh"

// They are counted by the library, so not once more as plain accesses: runtime/plain_access.h.

namespace flash_attention::ptx {

template <typename T, int n>
struct alignas(n * sizeof(T)) Vector {
  T values[n];
  T& operator[](int i) { return values[i]; }
  const T& operator[](int i) const { return values[i]; }
};

template <typename T>
constexpr bool one_access = (sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) &&
                            alignof(T) == sizeof(T);

template <typename T>
[[gnu::no_sanitize_address]] inline T load_global(const T* address) {
  static_assert(one_access<T>);
  emulator::table->access_global(emulator::Access::load_global, address, sizeof(T));
  return *address;
}

template <typename T>
inline T load_readonly(const T* address) {
  return load_global(address);
}

inline void prefetch_L2(const void* /*address*/) {}  // it shows in nothing but time

template <typename T>
[[gnu::no_sanitize_address]] inline void store_global(T* address, const T& value) {
  static_assert(one_access<T>);
  emulator::table->access_global(emulator::Access::store_global, address, sizeof(T));
  *address = value;
}

template <typename T>
[[gnu::no_sanitize_address]] inline T load_shared(unsigned address) {
  static_assert(one_access<T>);
  return *reinterpret_cast<const T*>(
      emulator::table->access_shared(emulator::Access::load_shared, address, sizeof(T), nullptr));
}

template <typename T>
[[gnu::no_sanitize_address]] inline void store_shared(unsigned address, const T& value) {
  static_assert(one_access<T>);
  emulator::table->access_shared(emulator::Access::store_shared, address, sizeof(T), &value);
}


}  // namespace flash_attention::ptx
