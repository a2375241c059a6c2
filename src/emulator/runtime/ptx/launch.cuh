#pragma once

// Emulated: kernels/ptx/launch.cuh. Launches come one after another; what is done without having waited is found.

namespace flash_attention::ptx {

inline void griddepcontrol_wait() { emulator::table->griddepcontrol_wait(); }

inline void griddepcontrol_launch_dependents() {}

}  // namespace flash_attention::ptx
