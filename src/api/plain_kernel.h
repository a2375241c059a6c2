#pragma once

#include <memory>
#include <string>

#include "backend/kernel.h"
#include "backend/plain_kernel.h"
#include "flash_attention/device.h"

namespace flash_attention {

/// The function `entry` of kernels/`unit`.cu on a GPU or the emulator. Throws Error(unsupported) for the CPU.
std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry, const DeviceInfo& device);

/// Loads a hand-written plan for one of kernels/micro on a GPU.
std::unique_ptr<Kernel> load_micro_kernel(const Plan& plan, const DeviceInfo& device);

/// The text of kernels/`unit`.cu.
std::string plain_kernel_source(const std::string& unit);

}  // namespace flash_attention
