#pragma once

#include <span>

#include "backend/backend.h"

namespace flash_attention::api {

/// Every kind of device, in the order of DeviceKind.
std::span<const Backend* const> backends();

/// The row of the device's kind. Throws Error(invalid_argument) for a number that is not a DeviceKind.
const Backend& backend_of(const Device& device);

}  // namespace flash_attention::api
