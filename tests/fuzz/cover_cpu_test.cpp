// The covering array on one instruction set, that of FLASH_ATTENTION_CPU_ISA: CTest runs this file once for each.
#include <gtest/gtest.h>

#include "cpu/detect.h"
#include "fuzz/check_problem.h"

namespace flash_attention::fuzz {
namespace {

/// Small, because the oracle is slow and the CPU's tiles are narrow.
constexpr Sizes small{.longest = 230, .max_products = 2e6};

TEST(CoverCpu, MatchesTheOracle) {
  const CpuIsa isa = cpu::chosen_isa();
  if (!cpu::has_isa(isa)) GTEST_SKIP() << "this CPU has no " << to_string(isa);
  // Each instruction set of this CPU takes a part of its own, so that all of them together see the whole array.
  int parts = 0, part = 0;
  for (const CpuIsa other :
       {CpuIsa::generic, CpuIsa::neon, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    if (!cpu::has_isa(other)) continue;
    if (other == isa) part = parts;
    ++parts;
  }
  if (testing::with_long_tail()) parts = 1, part = 0;
  int failed = 0, compared = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const bool forward = pass == Pass::forward;
    const std::pair<const char*, int> domains[] = {{forward ? "cpu/prefill" : "cpu/backward", 1},
                                                   {forward ? "forward/listed" : "backward/listed", 3}};
    for (const auto& [domain, one_in] : domains) {
      const int all = testing::with_long_tail() ? 1 : parts * one_in;
      for (const GeneratedProblem& problem : problems(domain, 1, array_seed(), small)) {
        if (problem.number % all != part || failed > 3) continue;
        const testing::Expected expected = testing::expect(problem.c, pass == Pass::backward);
        failed += !check_problem(problem, {.pass = pass}, expected);
        ++compared;
      }
    }
  }
  RecordProperty("problems", compared);  // with --gtest_output=xml
  EXPECT_GT(compared, 0);
}

}  // namespace
}  // namespace flash_attention::fuzz
