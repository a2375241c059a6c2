#pragma once

namespace flash_attention::emulator {

void barrier(int id, int threads, bool wait);  // __syncthreads, bar.sync, bar.arrive
void cluster_barrier(bool wait);               // barrier.cluster.arrive, barrier.cluster.wait
void set_registers(int count, bool increase);  // setmaxnreg

}  // namespace flash_attention::emulator
