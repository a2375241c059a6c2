#pragma once

// Emulated: kernels/ptx/tma.cuh.

#include "abi/args.h"
#include "ptx/mbarrier.cuh"

namespace flash_attention::ptx {

inline void tma_prefetch(const abi::TensorMap&) {}
inline void tma_prefetch_4d(const abi::TensorMap&, int, int, int, int) {}

template <int rank>
inline void tma_load(void* shared, const abi::TensorMap& map, Mbarrier& barrier, unsigned blocks, const int (&x)[rank]) {
  emulator::BulkOperand operand{.shared = shared_address(shared),
                                .map = &map,
                                .rank = rank,
                                .barrier = shared_address(&barrier),
                                .multicast = blocks};
  for (int i = 0; i < rank; ++i) operand.coordinates[i] = x[i];
  emulator::table->bulk_load(operand);
}

template <int rank>
inline void tma_store(const abi::TensorMap& map, const void* shared, const int (&x)[rank]) {
  emulator::BulkOperand operand{.shared = shared_address(shared), .map = &map, .rank = rank};
  for (int i = 0; i < rank; ++i) operand.coordinates[i] = x[i];
  emulator::table->bulk_store(operand);
}

inline void tma_load_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, int x0, int x1, int x2, int x3) {
  tma_load(shared, map, barrier, 0, {x0, x1, x2, x3});
}
inline unsigned long long l2_evict_first() { return 0; }
inline void tma_load_policy_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, unsigned long long, int x0,
                               int x1, int x2, int x3) {
  tma_load(shared, map, barrier, 0, {x0, x1, x2, x3});
}
inline void tma_load_5d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, int x0, int x1, int x2, int x3,
                        int x4) {
  tma_load(shared, map, barrier, 0, {x0, x1, x2, x3, x4});
}
inline void tma_multicast_4d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, unsigned short blocks, int x0,
                             int x1, int x2, int x3) {
  tma_load(shared, map, barrier, blocks, {x0, x1, x2, x3});
}
inline void tma_multicast_5d(void* shared, const abi::TensorMap& map, Mbarrier& barrier, unsigned short blocks, int x0,
                             int x1, int x2, int x3, int x4) {
  tma_load(shared, map, barrier, blocks, {x0, x1, x2, x3, x4});
}
inline void tma_store_4d(const abi::TensorMap& map, const void* shared, int x0, int x1, int x2, int x3) {
  tma_store(map, shared, {x0, x1, x2, x3});
}
inline void tma_store_5d(const abi::TensorMap& map, const void* shared, int x0, int x1, int x2, int x3, int x4) {
  tma_store(map, shared, {x0, x1, x2, x3, x4});
}

inline void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
  emulator::table->bulk_load(
      {.shared = shared_address(shared), .global = global, .bytes = bytes, .barrier = shared_address(&barrier)});
}

inline void bulk_store(void* global, const void* shared, int bytes) {
  emulator::table->bulk_store({.shared = shared_address(shared), .global = global, .bytes = bytes});
}

inline void bulk_reduce_add(float* global, const void* shared, int bytes) {
  emulator::table->bulk_store({.shared = shared_address(shared), .global = global, .bytes = bytes, .add = true});
}

inline void bulk_reduce_add_kept(float* global, const void* shared, int bytes) { bulk_reduce_add(global, shared, bytes); }

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
