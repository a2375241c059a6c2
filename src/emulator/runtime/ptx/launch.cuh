#pragma once

// Emulated: kernels/ptx/launch.cuh. Launches come one after another; what is done without having waited is found.

namespace flash_attention::ptx {

inline void await_launch_before() { emulator::table->await_launch_before(); }

inline void let_next_launch_begin() {}

}  // namespace flash_attention::ptx
