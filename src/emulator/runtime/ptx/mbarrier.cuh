#pragma once

// Emulated: kernels/ptx/mbarrier.cuh.

#include "ptx/shared.cuh"

namespace flash_attention::ptx {

struct alignas(8) Mbarrier {
  unsigned long long state;
};

inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  emulator::table->mbarrier_init(shared_address(&barrier), arrivals);
}
inline void mbarrier_init_fence() { emulator::table->mbarrier_init_fence(); }
inline void mbarrier_arrive(Mbarrier& barrier) { emulator::table->mbarrier_arrive(shared_address(&barrier), 1, 0); }
inline void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  emulator::table->mbarrier_arrive(shared_address(&barrier), 1, bytes);
}
inline bool mbarrier_test(Mbarrier& barrier, int parity) {
  return emulator::table->mbarrier_test(shared_address(&barrier), static_cast<unsigned>(parity));
}
inline void mbarrier_wait(Mbarrier& barrier, int parity) {
  emulator::table->mbarrier_wait(shared_address(&barrier), static_cast<unsigned>(parity));
}

}  // namespace flash_attention::ptx
