#pragma once

#include <string_view>

#include "cli/problem/arguments.h"
#include "flash_attention/device.h"

namespace flash_attention::cli {

/// What the units of a GPU can do, measured apart from each other: `bench micro` and `bench micro/NAME`.
int bench_micro(std::string_view set, const DeviceInfo& info);

}  // namespace flash_attention::cli
