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

/// Problems in which a mistake of a kernel shows: prime lengths, maxima that come late, NaN after the keys in use, rows
/// that see nothing, grouped heads, pairs of options. A kernel is tested with those that it takes.
std::vector<Problem> hostile_problems(Pass pass);

/// One that is long enough to be timed.
Problem timed_problem(const Problem& model);

/// How kernels are made: by the backend, but in tests.
using Load = std::function<std::unique_ptr<Kernel>(const Problem&, const Plan&)>;

/// Runs a kernel on the calls that it takes, and compares with the kernels of the host, which are proven. Where it takes
/// `timed`, it must not be slower there than `stand_in`, which is what would be used instead.
plan::Verdict self_test(std::string_view kernel, Pass pass, const std::vector<Call>& calls, const Call* timed,
                        std::string_view stand_in, const Machine& machine, const Machine& host, const Load& load);

}  // namespace flash_attention::tuning
