#pragma once

// Marks of branches that a test must have taken. On a GPU they do nothing; the emulator records them
// (emulator/checks/paths.h).

namespace flash_attention::ptx {

/// A text as a template argument.
struct PathName {
  char text[48] = {};

  template <int size>
  constexpr PathName(const char (&literal)[size]) {
    for (int i = 0; i < size; ++i) text[i] = literal[i];
  }
};

/// "KERNEL WHAT": the kernel's name as the planner knows it, and what happens here.
template <PathName name>
__device__ __forceinline__ void path() {}

}  // namespace flash_attention::ptx
