#pragma once

#include <set>
#include <string>

#include "flash_attention/export.h"

namespace flash_attention::emulator {

/// The marked branches (kernels/ptx/path.cuh) that emulated kernels have taken in this process.
FLASH_ATTENTION_API std::set<std::string> paths_taken();

void take_path(const char* name);

}  // namespace flash_attention::emulator
