#pragma once

#include <string>
#include <vector>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {

/// Who waits where, when no thread can go on.
std::string describe_deadlock(const std::vector<Block>& blocks, const LaunchShape& shape);

/// What one thread waits for, in words.
std::string describe_wait(const Thread& thread);

}  // namespace flash_attention::emulator
