#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flash_attention/tune.h"
#include "plan/tuned.h"
#include "tuning/rig.h"

namespace flash_attention::tuning {

/// How kernels are loaded and timed: by the backend, or in tests by stand-ins.
struct Tools {
  std::function<std::unique_ptr<Kernel>(const Problem&, const Plan&)> load;
  std::function<double(Rig&, const Kernel&, const plan::Alternative&)> seconds;
};
Tools tools_of(const DeviceInfo& device, const Backend& backend);

/// Compiles the alternatives of calls, each kernel once. Returns how many compile.
std::size_t load_alternatives(const std::vector<Call>& calls, const DeviceInfo& device, const Backend& backend);

/// The median of some samples of a plan, in seconds.
double time_plan(const Call& call, const Plan& plan, const DeviceInfo& device, const Backend& backend, double seconds);

/// The result for one case.
struct TunedCase {
  TuneResult result;
  plan::TunedChoice choice;  // no kernel: the planner's own choice stays
  bool decided = false;      // false: it was stopped, or could not be measured
};

/// Measures a call's alternatives. `seconds`: for the samples.
TunedCase tune_case(const Call& call, const DeviceInfo& device, const Backend& backend, const Tools& tools, double seconds,
                    const std::function<bool()>& stops);

}  // namespace flash_attention::tuning
