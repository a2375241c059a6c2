#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cli/stress/stress_report.h"
#include "flash_attention/device.h"

namespace flash_attention::cli {

struct StressOptions {
  Device device{};
  std::string kernel{};           ///< empty: the planner's choice
  std::string domain{};           ///< draw what this kernel takes; empty: several domains in turn
  bool every_kernel = false;      ///< all kernels that take a problem, not just one
  std::uint64_t seed = 1;         ///< of the first covering array; the next ones count on
  std::int64_t only = -1;         ///< this problem of that array alone
  int variant = 0;                ///< or this variant of it
  int variants = 1;               ///< problems for each of an array: itself, and others that need no other kernels
  int part = 0, parts = 1;        ///< of the arrays' configurations every parts-th, from this one on
  double seconds = 60;            ///< stop after this
  std::int64_t max_problems = 0;  ///< or after so many; 0: no bound
  int repeats = 2;                ///< calls of each pass, whose bits must agree
  int threads = 1;                ///< of the host: fp64 results and compilations ahead
};

/// The command that repeats one problem.
std::string command_of(const ProblemName& problem, const StressOptions& options);

/// Problem after problem of the covering arrays of tests/fuzz/generator, each compared with fp64, until the time is up, a
/// few have differed or stop() says so. `begins` hears of every problem before it runs, `progress` after.
StressReport stress(const StressOptions& options, const std::function<void(const ProblemName&)>& begins,
                    const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop);

}  // namespace flash_attention::cli
