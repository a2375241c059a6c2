#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "jit/kernel_key.h"

namespace flash_attention::jit {

/// Kernels that a few threads compile: each takes the next one.
struct CompileQueue {
  std::vector<KernelKey> keys;
  std::atomic<std::size_t> next = 0;

  std::size_t num_workers() const {
    return std::min<std::size_t>({keys.size(), 4, std::max(1u, std::thread::hardware_concurrency())});
  }

  template <typename Compile>
  void work(Compile compile) {
    for (std::size_t i = next++; i < keys.size(); i = next++) compile(keys[i]);
  }
};

}  // namespace flash_attention::jit
