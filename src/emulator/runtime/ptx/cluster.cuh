#pragma once

// Emulated: kernels/ptx/cluster.cuh.

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace flash_attention::ptx {

inline unsigned cluster_rank() { return emulator::thread->cluster_rank; }
inline void cluster_arrive() { emulator::table->cluster_barrier(false); }
inline void cluster_arrive_relaxed() { emulator::table->cluster_barrier(false); }  // the threads meet in the same way
inline void cluster_wait() { emulator::table->cluster_barrier(true); }

inline unsigned cluster_address(const void* shared, unsigned rank) {
  return shared_address(shared) | (rank + 1) << emulator::cluster_rank_shift;
}
inline unsigned cluster_load_word(unsigned address) { return load_shared<unsigned>(address); }
template <int count>
inline void cluster_store_async(unsigned address, const Vector<float, count>& values, unsigned barrier) {
  emulator::table->store_async(address, &values, sizeof values, barrier);
}
inline void cluster_mbarrier_arrive(unsigned barrier) { emulator::table->mbarrier_arrive(barrier, 1, 0); }

inline void cluster_mbarrier_arrive_read(unsigned barrier) { cluster_mbarrier_arrive(barrier); }
inline void cluster_mbarrier_wait(Mbarrier& barrier, int parity) { mbarrier_wait(barrier, parity); }

}  // namespace flash_attention::ptx
