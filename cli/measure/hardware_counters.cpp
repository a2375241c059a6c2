#include "cli/measure/hardware_counters.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

/// The fields of a line of CSV, all of them in quotes.
std::vector<std::string> fields(const std::string& line) {
  std::vector<std::string> found;
  bool inside = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"' && inside && i + 1 < line.size() && line[i + 1] == '"') {
      found.back() += line[++i];
    } else if (line[i] == '"') {
      inside = !inside;
      if (inside) found.emplace_back();
    } else if (inside) {
      found.back() += line[i];
    }
  }
  return found;
}

double scale_of(std::string_view unit) {
  static const std::map<std::string_view, double> scales = {{"us", 1e3},      {"usecond", 1e3}, {"ms", 1e6},
                                                            {"msecond", 1e6}, {"s", 1e9},       {"second", 1e9},
                                                            {"Kbyte", 1e3},   {"Mbyte", 1e6},   {"Gbyte", 1e9}};
  const auto found = scales.find(unit);
  return found == scales.end() ? 1 : found->second;
}

}  // namespace

const std::vector<HardwareCounter>& hardware_counters() {
  static const std::vector<HardwareCounter> all = {
      {"gpu__time_duration.sum", "time", 1e-3, "us"},
      {"dram__bytes_read.sum", "DRAM read", 1e-6, "MB"},
      {"dram__bytes_write.sum", "DRAM written", 1e-6, "MB"},
      {"sm__inst_executed_pipe_tensor.sum", "tensor instructions", 1, ""},
      {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "tensor pipe", 1, "%"},
      {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "bank conflicts", 1, ""},
      {"sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy", 1, "%"},
      {"launch__registers_per_thread", "registers", 1, ""}};
  return all;
}

const std::vector<std::pair<std::string, std::string>>& stall_counters() {
  static const std::vector<std::pair<std::string, std::string>> all = [] {
    std::vector<std::pair<std::string, std::string>> made;
    for (std::string reason : {"long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle",
                               "wait", "gmma", "membar"}) {
      const std::string id = "smsp__average_warps_issue_stalled_" + reason + "_per_issue_active.ratio";
      std::replace(reason.begin(), reason.end(), '_', ' ');
      made.emplace_back(id, reason);
    }
    return made;
  }();
  return all;
}

std::vector<CountedLaunch> parse_counters(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('"')) rows.push_back(fields(line));
  }
  if (rows.size() < 3) throw Error(ErrorCode::unavailable, "ncu: reported no launch; its output was:\n" + text);
  const std::vector<std::string>&header = rows[0], &units = rows[1];
  std::vector<CountedLaunch> launches;
  for (std::size_t row = 2; row < rows.size(); ++row) {
    CountedLaunch launch;
    for (std::size_t i = 0; i < std::min({header.size(), units.size(), rows[row].size()}); ++i) {
      std::string value = rows[row][i];
      if (header[i] == "Kernel Name") launch.kernel = value;
      std::erase(value, ',');
      char* end = nullptr;
      const double number = std::strtod(value.c_str(), &end);
      if (!value.empty() && *end == '\0') launch.values[header[i]] = number * scale_of(units[i]);
    }
    launches.push_back(std::move(launch));
  }
  return launches;
}

}  // namespace flash_attention::cli
