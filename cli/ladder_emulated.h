#pragma once

#include <vector>

#include "cli/arguments.h"
#include "cli/rung.h"

namespace flash_attention::cli {

/// Runs the rungs in the emulator: correctness and counts, beside the recorded speeds. Returns the exit code.
int climb_emulated(const std::vector<Rung>& rungs, const Arguments& arguments);

}  // namespace flash_attention::cli
