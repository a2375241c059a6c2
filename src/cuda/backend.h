#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"

namespace flash_attention::cuda {

/// The row for CUDA in the table of backends (src/api/backends.cpp).
extern const Backend backend;

/// Every GPU of this process; empty without a driver.
std::vector<DeviceInfo> devices();

/// Facts about one GPU. Throws Error(unavailable) with the reason and the next step.
DeviceInfo info(int index);

/// Compiles (or finds in the cache) and loads the plan's kernels on that GPU. `stream` is the call's (Options::stream):
/// while it is captured nothing can be compiled or loaded, so the call is refused.
std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device, void* stream = nullptr);

/// The same for one launch with another parameter type.
std::unique_ptr<LaunchedKernel> load_launch(const Launch& launch, const DeviceInfo& device, void* stream);

/// The same for a kernel outside of all plans.
std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry, const DeviceInfo& device);

/// Findings for `doctor` about the driver and the GPUs.
std::vector<Finding> diagnose();

}  // namespace flash_attention::cuda
