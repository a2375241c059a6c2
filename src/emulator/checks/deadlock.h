#pragma once

#include <string>
#include <vector>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {

/// Describes which thread waits where, if no thread can go on.
std::string describe_deadlock(const std::vector<Block>& blocks, const LaunchShape& shape);

/// Describes what one thread waits for.
std::string describe_wait(const Thread& thread);

}  // namespace flash_attention::emulator
