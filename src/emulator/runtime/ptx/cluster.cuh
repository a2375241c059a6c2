#pragma once

// Emulated: kernels/ptx/cluster.cuh.

namespace flash_attention::ptx {

inline unsigned cluster_rank() { return emulator::thread->cluster_rank; }
inline void cluster_arrive() { emulator::table->cluster_barrier(false); }
inline void cluster_wait() { emulator::table->cluster_barrier(true); }

}  // namespace flash_attention::ptx
