#pragma once

#include <cstdint>

namespace flash_attention::cli {

/// Measures how much the resident memory of this process rises above its start (Linux: VmHWM, reset by clear_refs).
class MemoryMeter {
 public:
  MemoryMeter();
  std::int64_t peak_growth_bytes() const;  ///< -1 where the system does not tell

 private:
  std::int64_t before_ = -1;
};

}  // namespace flash_attention::cli
