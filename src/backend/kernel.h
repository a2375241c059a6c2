#pragma once

#include <memory>

#include "flash_attention/attention.h"

namespace flash_attention {

/// A plan made executable: a CPU function, or loaded GPU modules. Holds no shapes; safe to launch from
/// several threads. Each backend makes these from a Plan (cpu::load_kernel, cuda::load_kernel, emulator::load_kernel).
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const = 0;
};

/// An executable launch of a kernel whose parameter is not that of attention.
class LaunchedKernel {
 public:
  virtual ~LaunchedKernel() = default;
  /// `arguments` points to a Launch::arguments.
  virtual void launch(const Launch& launch, void* arguments, void* stream) const = 0;
};

}  // namespace flash_attention
