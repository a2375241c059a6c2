#pragma once

#include <cctype>
#include <tuple>

#include "plan/ladder.h"
#include "support/contract.h"

namespace flash_attention::testing {

/// A rung and a case of the contract.
using Climb = std::tuple<plan::Rung, Case>;

/// Those of the contract's cases that the ladder takes, in the named types. A NaN behind the causal mask is left to the
/// production kernels: a rung on tensor cores multiplies it by a probability of zero.
inline std::vector<Case> ladder_cases(const std::vector<Dtype>& dtypes, const std::vector<std::string>& names) {
  std::vector<Case> cases;
  for (const Dtype dtype : dtypes) {
    for (const Case& c : contract_cases(dtype)) {
      if (std::find(names.begin(), names.end(), c.name) != names.end()) cases.push_back(c);
    }
  }
  return cases;
}

inline std::vector<Climb> climbs(Pass pass, const std::vector<Case>& cases) {
  std::vector<Climb> all;
  for (const plan::Rung& rung : plan::rungs()) {
    if (rung.pass != pass) continue;
    for (const Case& c : cases) {
      if (rung.float32 || c.problem.dtype != Dtype::float32) all.emplace_back(rung, c);
    }
  }
  return all;
}

inline std::string climb_name(const ::testing::TestParamInfo<Climb>& info) {
  const auto& [rung, c] = info.param;
  return std::string(rung.name.substr(rung.name.find('/') + 1)) + "_" + c.name + "_" +
         std::string(to_string(c.problem.dtype));
}

}  // namespace flash_attention::testing

namespace flash_attention::plan {

inline void PrintTo(const Rung& rung, std::ostream* out) { *out << rung.name; }

}  // namespace flash_attention::plan
