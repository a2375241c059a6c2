#pragma once

#include "jit/compiler.h"

namespace flash_attention::jit {

/// NVRTC. It is opened when something has to be compiled.
const Compiler& nvrtc_compiler();

}  // namespace flash_attention::jit
