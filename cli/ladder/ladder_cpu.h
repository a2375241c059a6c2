#pragma once

#include <vector>

#include "cli/ladder/rung.h"
#include "cli/problem/arguments.h"

namespace flash_attention::cli {

/// Checks and times the steps of the CPU ladder, and the library's own kernel after them. Returns the exit code.
int climb_on_cpu(const std::vector<Rung>& steps, const Arguments& arguments);

}  // namespace flash_attention::cli
