// Which element each thread of the primer's first warp writes. tools/draw_lessons.py draws it.

#include <cstdio>
#include <vector>

// After the standard headers, which the macros of the prelude would change.
// clang-format off
#include "prelude.h"
#include "primer/matrix_add.cu"
// clang-format on

namespace emulator = flash_attention::emulator;

int main() {
  constexpr int rows = 32, columns = 64;
  const std::vector<float> ones(rows * columns, 1);
  using Kernel = void (*)(const float*, const float*, float*, int, int);
  const struct {
    const char* name;
    Kernel kernel;
  } kernels[] = {{"matrix_add", matrix_add}, {"matrix_add_by_columns", matrix_add_by_columns}};
  for (const auto& [name, kernel] : kernels) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      emulator::ThreadView view{.thread = {lane, 0, 0}, .block_dim = {32, 8, 1}, .grid_dim = {8, 8, 1}, .lane = lane};
      emulator::thread = &view;
      std::vector<float> C(rows * columns);
      kernel(ones.data(), ones.data(), C.data(), rows, columns);
      for (int i = 0; i < rows * columns; ++i) {
        if (C[i] == 2) std::printf("%s %u %d %d\n", name, lane, i / columns, i % columns);
      }
    }
  }
}
