#pragma once

#include <memory>

#include "backend/backend.h"

namespace flash_attention::emulator {

/// The row of the table of backends (src/api/backends.cpp).
extern const Backend backend;

/// The GPU that the emulator plays: an A100-like sm_80 or an H200-like sm_90.
DeviceInfo info(int arch);

/// Builds (or finds in the cache) the plan's kernels as host code.
std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device);

/// The same for one launch with a separate parameter.
std::unique_ptr<LaunchedKernel> load_launch(const Launch& launch, const DeviceInfo& device);

/// The same for a kernel outside of all plans. Its plain accesses are counted, too.
std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry, const DeviceInfo& device);

}  // namespace flash_attention::emulator
