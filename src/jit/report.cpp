#include "jit/report.h"

#include <charconv>

namespace flash_attention::jit {
namespace {

/// The number before `unit` in the line ("0 bytes stack frame"), or 0.
int number_before(std::string_view line, std::string_view unit) {
  const std::size_t at = line.find(unit);
  if (at == std::string_view::npos || at == 0) return 0;
  std::size_t begin = line.find_last_not_of("0123456789", at - 1);
  begin = begin == std::string_view::npos ? 0 : begin + 1;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + at, number);
  return number;
}

bool is_about_slow_wgmma(std::string_view line) {
  const bool slow = line.find("serializ") != std::string_view::npos || line.find("injected") != std::string_view::npos;
  return slow && (line.find("wgmma") != std::string_view::npos || line.find("warpgroup") != std::string_view::npos);
}

}  // namespace

CompileReport read_report(std::string_view log) {
  CompileReport report;
  while (!log.empty()) {
    const std::size_t end = log.find('\n');
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(end == std::string_view::npos ? log.size() : end + 1);
    report.registers += number_before(line, " registers");
    report.stack_bytes += number_before(line, " bytes stack frame");
    report.spill_store_bytes += number_before(line, " bytes spill stores");
    report.spill_load_bytes += number_before(line, " bytes spill loads");
    report.shared_bytes += number_before(line, " bytes smem");
    if (is_about_slow_wgmma(line)) report.wgmma_warnings.emplace_back(line);
  }
  return report;
}

}  // namespace flash_attention::jit
