#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cli/output/json.h"
#include "cli/output/json_value.h"
#include "flash_attention/device.h"
#include "flash_attention/plan.h"

namespace flash_attention::cli {

/// Which problem: of the array of this seed, or a variant of it.
struct ProblemName {
  std::uint64_t seed = 0;
  std::int64_t number = 0;
  int variant = 0;
};

/// A result that is wrong, that changed, or a call that failed.
struct Difference {
  ProblemName problem{};
  std::string pass{};
  std::string kernel{};
  std::string text{};                ///< the problem in words
  std::vector<std::string> lines{};  ///< what differs
  std::string command{};             ///< that repeats it
};

struct StressReport {
  std::int64_t problems = 0;
  std::int64_t calls = 0;
  std::map<std::string, std::int64_t> calls_of_kernel{};
  std::set<std::string> compiled{};  ///< hashes of what was compiled, or loaded from the cache, for them
  std::uint64_t last_seed = 0;
  double seconds = 0;
  bool device_lost = false;  ///< the device failed, so nothing more could be run
  bool cut_off = false;      ///< by the time limit, while a part of the work was still under way
  std::vector<Difference> differences{};

  /// Whether a kernel that was named has shown nothing.
  bool compared_nothing() const { return problems > 0 && calls == 0 && differences.empty(); }
};

/// Counts of both.
void add(StressReport& sum, const StressReport& part);

/// With `compiled` as a list, for a report that is added to others; else their number.
Json to_json(const StressReport& report, bool for_sum);
StressReport report_from(const JsonValue& json);

void print(const StressReport& report);

}  // namespace flash_attention::cli
