#pragma once

#include <vector>

#include "flash_attention/runtime.h"

namespace flash_attention::jit {

/// Findings for `doctor` about NVRTC and the kernel caches.
std::vector<Finding> diagnose();

}  // namespace flash_attention::jit
