#pragma once

#include <vector>

#include "flash_attention/plan.h"
#include "flash_attention/runtime.h"

namespace flash_attention::api {

/// Tests the kernel of a plan that was never run on such a GPU before it is used on this one, and keeps the verdict. Returns
/// true where the device's facts must be asked again, since they have the verdict now; false where nothing was tested.
bool qualify(const Problem& problem, const Plan& plan, const DeviceInfo& device);

/// What is known of kernels that were never run on such a GPU.
std::vector<Finding> verdicts_on(const DeviceInfo& device);

}  // namespace flash_attention::api
