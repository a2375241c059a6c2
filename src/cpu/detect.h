#pragma once

#include "flash_attention/device.h"

namespace flash_attention::cpu {

/// Whether this CPU and its operating system run an instruction set. For AMX the process asks for the tile registers.
bool has_isa(CpuIsa isa);

/// The most capable one here.
CpuIsa best_isa();

/// Processors that this process may use: the affinity mask, cut by the quota of its control group.
int usable_processors();

}  // namespace flash_attention::cpu
