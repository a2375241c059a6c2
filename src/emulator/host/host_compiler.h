#pragma once

#include "jit/compiler.h"

namespace flash_attention::emulator {

/// The host's C++ compiler. It gets the same source as NVRTC, but with src/emulator/runtime instead of kernels/ptx, and
/// makes a shared object. The unit defines `extern "C" __global__ void kernel(Argument)`.
const jit::Compiler& host_compiler();

}  // namespace flash_attention::emulator
