#pragma once

#include "emulator/checks/counters.h"

namespace flash_attention::emulator {

/// Adds the counters of one worker to the process's sum.
void add_counters(const Counters& counters);

/// Whether single accesses must be counted.
bool counting_accesses();

}  // namespace flash_attention::emulator
