#pragma once

#include <cstdint>
#include <string>

namespace flash_attention::cpu {

/// Bytes of this CPU's data caches; 0 where the system does not say.
struct Caches {
  std::int64_t core = 0;  // level 2, of one core
  std::int64_t last = 0;  // of the last level that there is
};

/// What Linux says of the caches of one processor. folder: /sys/devices/system/cpu/cpu0/cache.
Caches read_caches(const std::string& folder);

/// Asked once in a process: of Linux, else of the C library.
const Caches& caches();

}  // namespace flash_attention::cpu
