#pragma once

#include <vector>

#include "cli/ladder/rung.h"
#include "cli/problem/arguments.h"

namespace flash_attention::cli {

/// Checks and times the rungs on a GPU, saves and updates what the flags say. Returns the exit code.
int climb_on_gpu(const std::vector<Rung>& rungs, const DeviceInfo& info, const Arguments& arguments);

}  // namespace flash_attention::cli
