#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/measure/accuracy.h"
#include "cli/measure/workload.h"
#include "emulator/checks/counters.h"

namespace flash_attention::cli {

struct Timing {
  double median_s = 0;
  double low_s = 0;   ///< a tenth of the samples are faster
  double high_s = 0;  ///< a tenth are slower
  int samples = 0;    ///< 0: not measured
};

/// Median and spread of samples in seconds, in any order.
Timing to_timing(std::vector<double> samples);

/// Everything the command says about one call.
struct Measurement {
  Problem problem;
  Pass pass = Pass::forward;
  Device device;
  std::string kernel;
  Timing timing;             ///< never set on the emulator: its time says nothing about a GPU
  double of_plain_read = 0;  ///< CPU, decoding: time of a plain loop over the same K and V by the same threads, over the
                             ///< call's; the two alternate, both with empty caches, and this is the median
  std::int64_t workspace_bytes = 0;
  std::int64_t peak_extra_bytes = -1;  ///< CPU: measured growth of resident memory in the first call; -1 = not measured
  std::int64_t repaired_tiles = -1;    ///< forward/sm90: tiles that were done again; -1 = not counted
  std::optional<emulator::Counters> counters;  ///< emulator: what the kernels did
  std::vector<Accuracy> accuracy;

  bool ok() const;
  double flops_per_second() const;     ///< 0 where not timed
  double kv_bytes_per_second() const;  ///< K and V read once; 0 where not timed
  double extra_bytes() const;          ///< memory beyond inputs and results: measured where possible, else the workspace
};

struct MeasureLimits {
  double seconds = 1.0;  ///< stop sampling after this
  int max_samples = 200;
  int min_samples = 3;  ///< unless they take more than three seconds
  bool check = true;    ///< against fp64
};

/// Calls the pass on fresh random inputs (for a backward pass, after the forward pass it belongs to) and measures it.
Measurement measure(const Problem& problem, Pass pass, const Options& options, const MeasureLimits& limits);

/// The forward pass that a backward pass belongs to, by the planner's choice.
void run_forward(Workload& work);

/// The same on inputs that exist already; for a backward pass the forward results must be, too. The kernel is the one
/// that the workload's options name.
Measurement measure(Workload& work, Pass pass, const MeasureLimits& limits);

bool is_backward(Pass pass);

/// Q, K, V and O once, for a backward pass also dO, dQ, dK and dV: what any kernel must move at least.
double min_bytes(const Problem& problem, Pass pass);

/// Few queries against many keys: the time goes into reading K and V.
bool is_decoding(const Problem& problem);

}  // namespace flash_attention::cli
