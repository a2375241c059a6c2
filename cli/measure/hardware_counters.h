#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::cli {

/// A counter of Nsight Compute and how it is shown.
struct HardwareCounter {
  std::string_view id;    ///< as `ncu --query-metrics` lists it
  std::string_view name;  ///< for people
  double scale;
  std::string_view unit;
};

/// The few that explain an attention kernel: time, DRAM traffic, tensor pipe, bank conflicts, occupancy, registers.
const std::vector<HardwareCounter>& hardware_counters();

/// Why warps wait, in warps per issued instruction: (the counter, what it stands for).
const std::vector<std::pair<std::string, std::string>>& stall_counters();

/// What was counted for one launch, by id, in ns, bytes, percent or plain numbers; a counter without a value is not there.
struct CountedLaunch {
  std::string kernel;
  std::map<std::string, double, std::less<>> values;
};

/// Reads the output of `ncu --csv --page raw`. Throws Error(unavailable) if it contains no launch.
std::vector<CountedLaunch> parse_counters(const std::string& text);

}  // namespace flash_attention::cli
