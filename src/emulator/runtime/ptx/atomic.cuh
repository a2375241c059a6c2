#pragma once

// Emulated: kernels/ptx/atomic.cuh. Blocks run on several OS threads, so these are atomic for the host too.

#include "ptx/memory.cuh"

namespace flash_attention::ptx {

inline void reduce_add(float* address, float value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 4);
  auto* bits = reinterpret_cast<unsigned*>(address);
  unsigned old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  unsigned sum;
  do {
    sum = __builtin_bit_cast(unsigned, __builtin_bit_cast(float, old) + value);
  } while (!__atomic_compare_exchange_n(bits, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

inline void reduce_add(float* address, const Vector<float, 4>& values) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 16);
  for (int i = 0; i < 4; ++i) reduce_add(address + i, values[i]);
}

inline void reduce_max(unsigned* address, unsigned value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 4);
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void reduce_max(int* address, int value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 4);
  int old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void reduce_min(unsigned* address, unsigned value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 4);
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old > value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void reduce_add(long long* address, long long value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 8);
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned atomic_add(unsigned* address, unsigned value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 4);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

inline unsigned atomic_add_acq_rel(unsigned* address, unsigned value) { return atomic_add(address, value); }

inline unsigned long long atomic_add_acq_rel(unsigned long long* address, unsigned long long value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 8);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

inline unsigned long long compare_exchange(unsigned long long* address, unsigned long long expected,
                                           unsigned long long value) {
  emulator::table->access_global(emulator::Access::reduce_global, address, 8);
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

inline unsigned long long load_relaxed(const unsigned long long* address) {
  emulator::table->access_global(emulator::Access::load_global, address, 8);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

inline unsigned load_acquire(const unsigned* address) {
  emulator::table->spin();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline void store_release(unsigned* address, unsigned value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }

}  // namespace flash_attention::ptx
