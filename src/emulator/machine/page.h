#pragma once

#include <unistd.h>

#include <cstddef>

namespace flash_attention::emulator {

/// The smallest unit that mprotect guards.
inline const std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

}  // namespace flash_attention::emulator
