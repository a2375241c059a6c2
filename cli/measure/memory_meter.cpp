#include "cli/measure/memory_meter.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace flash_attention::cli {
namespace {

std::int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kibibytes = 0;
    if (word == field + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return -1;
}

}  // namespace

MemoryMeter::MemoryMeter() {
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5" << std::flush;  // the peak becomes the present resident memory
  if (clear) before_ = status_bytes("VmRSS");
}

std::int64_t MemoryMeter::peak_growth_bytes() const {
  const std::int64_t peak = status_bytes("VmHWM");
  return before_ < 0 || peak < 0 ? -1 : std::max<std::int64_t>(0, peak - before_);
}

}  // namespace flash_attention::cli
