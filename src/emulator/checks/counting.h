#pragma once

#include "emulator/checks/counters.h"

namespace flash_attention::emulator {

/// Adds what one worker has counted to the process's sum.
void add_counters(const Counters& counters);

/// Whether single accesses are to be counted.
bool counting_accesses();

}  // namespace flash_attention::emulator
