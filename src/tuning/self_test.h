#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan/tuned.h"
#include "tuning/rig.h"

namespace flash_attention::tuning {

/// A device with its backend.
struct Machine {
  DeviceInfo device;
  const Backend& backend;
};

/// Problems that reveal mistakes of a kernel: prime lengths, late maxima, NaN after the keys in use, rows that see
/// nothing, grouped heads, pairs of options. A kernel is tested with the problems that it takes.
std::vector<Problem> hostile_problems(Pass pass);

/// A problem that is long enough to be timed.
Problem timed_problem(const Problem& model);

/// Loads kernels: by the backend, or in tests by a stand-in.
using Load = std::function<std::unique_ptr<Kernel>(const Problem&, const Plan&)>;

/// Runs a kernel on the calls that it takes, and compares its results with those of the host's kernels, which are
/// proven. If it takes `timed`, it must not be slower there than `stand_in`, the plan that would be used instead.
plan::Verdict self_test(std::string_view kernel, Pass pass, const std::vector<Call>& calls, const Call* timed,
                        std::string_view stand_in, const Machine& machine, const Machine& host, const Load& load);

}  // namespace flash_attention::tuning
