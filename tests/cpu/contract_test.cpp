#include "support/contract.h"

#include <gtest/gtest.h>

#include <cctype>
#include <optional>

#include "cpu/detect.h"
#include "support/settings.h"

// The contract on one instruction set, that of FLASH_ATTENTION_CPU_ISA: a process for each, because the settings are read
// once. CTest sets three threads, too, whatever the machine has: so that work is split and merged.

namespace flash_attention::testing {
namespace {

struct Run {
  Case c;
  Target target;
};

/// The case with so few queries that cpu/decode takes it. Strides and lengths that go with more queries are left alone.
std::optional<Case> with_few_queries(Case c) {
  Problem& p = c.problem;
  const bool own_strides = !(p.q_strides == Strides{}) || !(p.out_strides == Strides{});
  if (p.packed || p.seqused_q || own_strides || p.heads_q / p.heads_kv > 4 || p.seq_q < 2) return std::nullopt;
  c.name += "_few";
  for (ScoreTensor* t : {&p.bias, &p.mask}) {  // dense over fewer rows
    if (t->q_stride == 0) continue;
    t->head_stride = t->head_stride / p.seq_q * 2;
    t->batch_stride = t->batch_stride / p.seq_q * 2;
  }
  p.seq_q = 2;
  return c;
}

std::vector<Run> runs() {
  std::vector<Run> all;
  for (Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const Case& c : contract_cases(dtype)) {
      all.push_back({c, {}});  // the planner's choice
      all.push_back({c, {.kernel = "cpu/prefill"}});
      if (c.problem.heads_q / c.problem.heads_kv * c.problem.seq_q <= 8) all.push_back({c, {.kernel = "cpu/decode"}});
      if (const auto few = with_few_queries(c)) {
        all.push_back({*few, {.kernel = "cpu/decode"}});
        all.push_back({*few, {.kernel = "cpu/decode", .pass = Pass::backward}});
      }
      all.push_back({c, {.pass = Pass::backward}});
      all.push_back({c, {.pass = Pass::standard_forward}});
      all.push_back({c, {.pass = Pass::standard_backward}});
    }
  }
  return all;
}

std::string run_name(const ::testing::TestParamInfo<Run>& info) {
  const std::string &kernel = info.param.target.kernel, pass(to_string(info.param.target.pass));
  std::string name = info.param.c.name + "_" + std::string(to_string(info.param.c.problem.dtype)) + "_";
  for (char c : kernel.empty() ? pass : kernel + "_" + pass) {
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return name;
}

void PrintTo(const Run& run, std::ostream* out) { *out << run.c.name << ": " << to_string(run.c.problem); }

/// Those whose bits are compared between two runs: one type is enough, the order of the sums is the same for all.
std::vector<Run> repeated_runs() {
  std::vector<Run> all;
  for (Run& run : runs()) {
    const bool flash = run.target.pass == Pass::forward || run.target.pass == Pass::backward;
    if (flash && run.c.problem.dtype == Dtype::bfloat16) all.push_back(std::move(run));
  }
  return all;
}

class CpuContract : public ::testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
    const CpuIsa isa = support::settings().cpu_isa.value_or(cpu::best_isa());
    if (!cpu::has_isa(isa)) GTEST_SKIP() << "this CPU has no " << to_string(isa);
  }
};

class CpuRepeated : public CpuContract {};

TEST_P(CpuContract, MatchesTheOracle) { check(GetParam().c, GetParam().target); }
TEST_P(CpuRepeated, HasTheSameBits) { check_reproducible(GetParam().c, GetParam().target); }

INSTANTIATE_TEST_SUITE_P(All, CpuContract, ::testing::ValuesIn(runs()), run_name);
INSTANTIATE_TEST_SUITE_P(All, CpuRepeated, ::testing::ValuesIn(repeated_runs()), run_name);

}  // namespace
}  // namespace flash_attention::testing
