#pragma once

#include <memory>

#include "backend/backend.h"

namespace flash_attention::emulator {

/// The emulator's row in the table of backends (src/api/backends.cpp).
extern const Backend backend;

/// The emulated GPU: sm_80 like an A100, or sm_90 like an H200.
DeviceInfo info(int arch);

/// Builds (or finds in the cache) the plan's kernels as host code.
std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device);

/// The same for one launch with another parameter type.
std::unique_ptr<LaunchedKernel> load_launch(const Launch& launch, const DeviceInfo& device);

/// The same for a kernel outside of all plans. Its plain accesses are counted, too.
std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry, const DeviceInfo& device);

}  // namespace flash_attention::emulator
