#include "cli/output/format.h"

#include <cstdarg>
#include <cstdio>

namespace flash_attention::cli {

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return format(unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
}

std::string format_growth(double bytes) { return bytes < 1 << 20 ? "< 1 MiB" : format_bytes(bytes); }

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return format("%.2f us", seconds * 1e6);
  if (seconds < 1) return format("%.3f ms", seconds * 1e3);
  return format("%.3f s", seconds);
}

std::string format_flops(double flops_per_second) {
  if (flops_per_second < 1e12) return format("%.1f GFLOP/s", flops_per_second / 1e9);
  return format("%.1f TFLOP/s", flops_per_second / 1e12);
}

}  // namespace flash_attention::cli
