#pragma once

#include <cstdint>

#include "flash_attention/device.h"
#include "flash_attention/export.h"

namespace flash_attention::cpu {

/// The most that the machine can do, measured now: the yardstick of a benchmark.
struct Peaks {
  double flops = 0;       ///< float multiply-adds a second from registers, two FLOPs each
  double read_bytes = 0;  ///< bytes a second read from memory, out of a buffer larger than the caches
};

/// Measures for about a quarter of a second. The instruction set is the one that info() reports.
FLASH_ATTENTION_API Peaks measure_peaks(int threads);

/// Seconds that the library's threads need to read `bytes` once, one part each. A multiple of 4096 bytes.
FLASH_ATTENTION_API double read_seconds(const void* from, std::int64_t bytes);

}  // namespace flash_attention::cpu
