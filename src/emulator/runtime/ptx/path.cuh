#pragma once

// Emulated: kernels/ptx/path.cuh. The library hears of each path once from a unit.

namespace flash_attention::ptx {

struct PathName {
  char text[48] = {};

  template <int size>
  constexpr PathName(const char (&literal)[size]) {
    for (int i = 0; i < size; ++i) text[i] = literal[i];
  }
};

template <PathName name>
inline void path() {
  static bool told = false;  // several blocks run at a time: told twice is as good
  if (__atomic_exchange_n(&told, true, __ATOMIC_RELAXED)) return;
  emulator::table->path(name.text);
}

}  // namespace flash_attention::ptx
