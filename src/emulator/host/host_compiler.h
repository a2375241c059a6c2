#pragma once

#include "jit/compiler.h"

namespace flash_attention::emulator {

/// The host's C++ compiler. It gets what NVRTC would get, but src/emulator/runtime in the place of kernels/ptx, and makes a
/// shared object of it. The unit defines `extern "C" __global__ void kernel(Argument)`.
const jit::Compiler& host_compiler();

}  // namespace flash_attention::emulator
