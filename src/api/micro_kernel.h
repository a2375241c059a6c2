#pragma once

#include <memory>

#include "backend/kernel.h"
#include "flash_attention/device.h"

namespace flash_attention {

/// Loads a hand-written plan for one of kernels/micro on a GPU.
std::unique_ptr<Kernel> load_micro_kernel(const Plan& plan, const DeviceInfo& device);

}  // namespace flash_attention
