#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "cpu/detect.h"
#include "support/contract.h"

// The contract on one instruction set: a program of its own for each, because the settings are read once in a process.
// Three threads, whatever the machine has: so that work is split and merged.

namespace flash_attention::testing {

/// Before the first call asks for the settings.
inline bool choose_isa(const char* name) {
  return setenv("FLASH_ATTENTION_CPU_ISA", name, 1) == 0 && setenv("FLASH_ATTENTION_THREADS", "3", 1) == 0;
}

struct Run {
  Case c;
  Target target;
};

inline std::vector<Run> runs() {
  std::vector<Run> all;
  for (Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const Case& c : contract_cases(dtype)) {
      for (const char* kernel : {"cpu/decode", "cpu/prefill"}) all.push_back({c, {.kernel = kernel}});
      all.push_back({c, {.pass = Pass::backward}});
      all.push_back({c, {.pass = Pass::standard_forward}});
      all.push_back({c, {.pass = Pass::standard_backward}});
    }
  }
  return all;
}

inline std::string run_name(const ::testing::TestParamInfo<Run>& info) {
  std::string name = info.param.c.name + "_" + std::string(to_string(info.param.c.problem.dtype)) + "_";
  for (char c : info.param.target.kernel.empty() ? std::string(to_string(info.param.target.pass)) : info.param.target.kernel) {
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return name;
}

inline void PrintTo(const Run& run, std::ostream* out) { *out << run.c.name << ": " << to_string(run.c.problem); }

class CpuContract : public ::testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
    const CpuIsa isa = isa_under_test;
    if (!cpu::has_isa(isa)) GTEST_SKIP() << "this CPU has no " << to_string(isa);
  }
  static const CpuIsa isa_under_test;
};

TEST_P(CpuContract, MatchesTheOracle) { check(GetParam().c, GetParam().target); }
TEST_P(CpuContract, IsReproducible) { check_reproducible(GetParam().c, GetParam().target); }

INSTANTIATE_TEST_SUITE_P(All, CpuContract, ::testing::ValuesIn(runs()), run_name);

}  // namespace flash_attention::testing
