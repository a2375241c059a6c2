#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/stress/stress_report.h"

namespace flash_attention::cli {

/// A line of a process that works on a part, on its standard output.
std::string line_of(const StressReport& report);
std::string line_of_running(const std::string& command);

/// Runs the commands side by side and adds up what they report. One that dies by a signal is a difference, with the command
/// that it was about to run. They are ended when all together have done `max_problems` (0: no bound), a while after
/// `seconds`, or when stop() says so. Throws Error where one could not begin: what it said on standard error is seen.
StressReport run_jobs(const std::vector<std::vector<std::string>>& commands, std::int64_t max_problems, double seconds,
                      const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop);

}  // namespace flash_attention::cli
