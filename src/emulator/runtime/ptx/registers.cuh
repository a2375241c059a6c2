#pragma once

// Emulated: kernels/ptx/registers.cuh.

namespace flash_attention::ptx {

template <int count>
inline void registers_increase() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
  emulator::table->set_registers(count, true);
}

template <int count>
inline void registers_decrease() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
  emulator::table->set_registers(count, false);
}

inline int hide_from_compiler(int value) { return value; }

inline int fresh_grid_size() { return static_cast<int>(gridDim.x); }

}  // namespace flash_attention::ptx
