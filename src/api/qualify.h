#pragma once

#include <vector>

#include "flash_attention/plan.h"
#include "flash_attention/runtime.h"

namespace flash_attention::api {

/// If a plan's kernel has never run on such a GPU, tests it before it is used here, and keeps the verdict. Returns true
/// if the device's facts must be read again because they now include the verdict; false if nothing was tested.
bool qualify(const Problem& problem, const Plan& plan, const DeviceInfo& device);

/// The verdicts on kernels that had never run on such a GPU.
std::vector<Finding> verdicts_on(const DeviceInfo& device);

}  // namespace flash_attention::api
