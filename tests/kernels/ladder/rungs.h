#pragma once

#include <algorithm>
#include <cctype>
#include <tuple>

#include "plan/ladder/ladder.h"
#include "support/cases/contract.h"
#include "support/long_tail.h"

namespace flash_attention::testing {

/// A rung and a case of the contract.
using Climb = std::tuple<plan::Rung, Case>;

/// Those of the contract's cases that show every kind of size, layout and mask that the ladder takes, in few
/// configurations: each is compiled for every rung. A NaN behind the causal mask is left to the production kernels: a rung
/// on tensor cores multiplies it by a probability of zero.
inline std::vector<Case> ladder_cases(Dtype dtype) {
  const std::vector<std::string> most{
      "plain",  "long_keys", "long_queries",        "one_query",      "no_key",      "gqa",         "gaps",
      "causal", "growing",   "causal_more_queries", "growing_causal", "head_dim_40", "head_dim_128"};
  const std::vector<std::string> names = dtype == Dtype::bfloat16 ? most : std::vector<std::string>{"plain", "head_dim_8"};
  std::vector<Case> cases;
  for (const Case& c : contract_cases(dtype)) {
    if (std::find(names.begin(), names.end(), c.name) != names.end()) cases.push_back(c);
  }
  return cases;
}

/// The same for a rung of 8 bits, in sizes whose rows TMA can reach: the oracle sees what the codes mean. Scores of 200,
/// which the growing cases have, are left out: a dot product of 14 bits has too few for them, in forward/sm90_fp8 as well.
inline std::vector<Case> narrow_ladder_cases() {
  const std::vector<std::string> names{"plain",  "long_keys",    "long_queries", "one_query", "gqa", "causal_more_queries",
                                       "causal", "head_dim_128", "q8_plain",     "q8_gaps"};
  std::vector<Case> cases;
  const auto add = [&](Case c) {
    if (std::find(names.begin(), names.end(), c.name) == names.end()) return;
    c.problem.q_dtype = c.problem.kv_dtype = Dtype::float8_e4m3;
    c.narrow_products = true;
    cases.push_back(std::move(c));
  };
  for (const Case& c : contract_cases(Dtype::bfloat16)) add(c);
  for (const Case& c : narrow_query_cases(Dtype::bfloat16)) add(c);
  return cases;
}

/// Neighbouring rungs are one change apart: each takes every fifth case, the next rungs the rest (many have 17 cases and
/// count as one more, so every sixth would be the same in all), and the keys that go around rings. The long tail has all.
inline std::vector<Climb> climbs(Pass pass) {
  std::vector<Climb> all;
  std::size_t count = 0;
  for (const plan::Rung& rung : plan::rungs()) {
    if (rung.pass != pass) continue;
    ++count;
    if (rung.narrow) {
      for (const Case& c : narrow_ladder_cases()) {
        if (with_long_tail() || ++count % 2 == 0) all.emplace_back(rung, c);
      }
      continue;
    }
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
      if (dtype == Dtype::float32 && !rung.float32) continue;
      for (const Case& c : ladder_cases(dtype)) {
        if (++count % 5 == 0 || c.name == "long_keys" || with_long_tail()) all.emplace_back(rung, c);
      }
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
