#include "cpu/caches.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace flash_attention::cpu {
namespace {

/// "1024K", "32M" or a plain number of bytes.
std::int64_t parse_size(const std::string& text) {
  std::size_t end = 0;
  try {
    const std::int64_t size = std::stoll(text, &end);
    const char unit = end < text.size() ? text[end] : ' ';
    return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
  } catch (const std::exception&) {
    return 0;
  }
}

/// In a virtual machine it may count the caches of all processors of the host, so it is used only if Linux has no
/// answer.
Caches ask_library() {
  const std::int64_t second = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0L);
  const std::int64_t third = std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L);
  return {second, third > 0 ? third : second};
}

}  // namespace

Caches read_caches(const std::string& folder) {
  Caches caches;
  int last_level = 0;
  for (int index = 0;; ++index) {
    const std::string cache = folder + "/index" + std::to_string(index) + "/";
    int level = 0;
    std::string type, size;
    if (!(std::ifstream(cache + "level") >> level)) return caches;
    if (!(std::ifstream(cache + "type") >> type) || type == "Instruction") continue;
    if (!(std::ifstream(cache + "size") >> size)) continue;
    const std::int64_t bytes = parse_size(size);
    if (level == 2) caches.core = bytes;
    if (level > last_level) last_level = level, caches.last = bytes;
  }
}

const Caches& caches() {
  static const Caches process = [] {
    const Caches found = read_caches("/sys/devices/system/cpu/cpu0/cache");
    return found.last > 0 ? found : ask_library();
  }();
  return process;
}

}  // namespace flash_attention::cpu
