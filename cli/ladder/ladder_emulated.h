#pragma once

#include <vector>

#include "cli/ladder/rung.h"
#include "cli/problem/arguments.h"

namespace flash_attention::cli {

/// Runs the rungs in the emulator: correctness and counts, with the recorded speeds. Returns the exit code.
int climb_emulated(const std::vector<Rung>& rungs, const Arguments& arguments);

}  // namespace flash_attention::cli
