#pragma once

// Emulated: kernels/ptx/barrier.cuh.

namespace flash_attention::ptx {

inline void barrier_sync(int id, int threads) { emulator::table->barrier(id, threads, true); }
inline void barrier_sync_apart(int id, int threads) { emulator::table->barrier(id, threads, true); }
inline void barrier_arrive(int id, int threads) { emulator::table->barrier(id, threads, false); }

}  // namespace flash_attention::ptx
