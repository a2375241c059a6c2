#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "flash_attention/device.h"
#include "flash_attention/plan.h"

namespace flash_attention::cli {

struct StressOptions {
  Device device{};
  std::string kernel{};           ///< empty: the planner's choice
  bool every_kernel = false;      ///< all kernels that take a problem, not just one
  std::uint64_t seed = 1;         ///< of the first covering array; the next ones count on
  std::int64_t only = -1;         ///< this problem of that array alone
  double seconds = 60;            ///< stop after this
  std::int64_t max_problems = 0;  ///< or after so many; 0: no bound
  int repeats = 2;                ///< calls of each pass, whose bits must agree
  int threads = 1;                ///< of the host: fp64 results and compilations ahead
};

/// A result that is wrong, that changed, or a call that failed.
struct Difference {
  std::uint64_t seed = 0;
  std::int64_t problem = 0;
  Pass pass = Pass::forward;
  std::string kernel;
  std::string text;                ///< the problem in words
  std::vector<std::string> lines;  ///< what differs
};

struct StressReport {
  std::int64_t problems = 0;
  std::int64_t calls = 0;
  std::map<std::string, std::int64_t> calls_of_kernel;
  std::uint64_t last_seed = 0;
  double seconds = 0;
  bool device_lost = false;  ///< the device failed, so nothing more could be run
  std::vector<Difference> differences;
};

/// Problem after problem of the covering arrays of tests/fuzz/generator, each compared with fp64, until the time is up, a
/// few have differed or stop() says so. `begins` hears of every problem (seed and number) before it runs, `progress` after.
StressReport stress(const StressOptions& options, const std::function<void(std::uint64_t, std::int64_t)>& begins,
                    const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop);

}  // namespace flash_attention::cli
