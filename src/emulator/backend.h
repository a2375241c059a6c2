#pragma once

#include <memory>

#include "plan/kernel.h"

namespace flash_attention::emulator {

/// The GPU that the emulator plays: an A100-like sm_80 or an H200-like sm_90.
DeviceInfo info(int arch);

/// Builds (or finds in the cache) the plan's kernels as host code.
std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device);

}  // namespace flash_attention::emulator
