#pragma once

#include <cstdint>
#include <string>

namespace flash_attention::cpu {

/// Bytes of this CPU's data caches; 0 if unknown.
struct Caches {
  std::int64_t core = 0;  // level 2, of one core
  std::int64_t last = 0;  // of the last level
};

/// Reads Linux's description of the caches of one processor. folder: /sys/devices/system/cpu/cpu0/cache.
Caches read_caches(const std::string& folder);

/// Read once in a process: from Linux, or from the C library.
const Caches& caches();

}  // namespace flash_attention::cpu
