#pragma once

// Emulated: kernels/ptx/tma.cuh.

#include "abi/args.h"
#include "ptx/mbarrier.cuh"

namespace flash_attention::ptx {

inline void tma_prefetch(const abi::TensorMap&) {}

inline void tma_load_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, int x0, int x1, int x2, int x3) {
  emulator::table->bulk_load({.shared = shared_address(shared),
                              .map = &map,
                              .rank = 4,
                              .coordinates = {x0, x1, x2, x3},
                              .barrier = shared_address(&barrier)});
}

inline void tma_store_4d(const abi::TensorMap& map, const void* shared, int x0, int x1, int x2, int x3) {
  emulator::table->bulk_store({.shared = shared_address(shared), .map = &map, .rank = 4, .coordinates = {x0, x1, x2, x3}});
}

inline void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
  emulator::table->bulk_load(
      {.shared = shared_address(shared), .global = global, .bytes = bytes, .barrier = shared_address(&barrier)});
}

inline void bulk_reduce_add(float* global, const void* shared, int bytes) {
  emulator::table->bulk_store({.shared = shared_address(shared), .global = global, .bytes = bytes, .add = true});
}

inline void bulk_commit() { emulator::table->bulk_commit(); }

template <int pending>
inline void bulk_wait_read() {
  emulator::table->bulk_wait(pending, true);
}

template <int pending>
inline void bulk_wait() {
  emulator::table->bulk_wait(pending, false);
}

}  // namespace flash_attention::ptx
