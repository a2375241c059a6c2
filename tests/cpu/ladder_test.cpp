#include "support/cases/contract.h"

// The four steps of the CPU ladder against the oracle: every case of the contract that they take.

namespace flash_attention::testing {
namespace {

using Climb = std::tuple<std::string, Case>;

using CpuLadder = ::testing::TestWithParam<Climb>;

TEST_P(CpuLadder, MeetsTheContract) {
  const auto& [step, c] = GetParam();
  check(c, {.device = {.kind = DeviceKind::cpu}, .kernel = "ladder/" + step, .pass = Pass::forward});
}

/// All but a NaN behind the mask, which a probability of zero multiplies in the vector steps; what a step does not take is
/// skipped.
std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const Case& c : contract_cases(Dtype::float32)) {
    if (c.nan_value < 0) cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cpu, CpuLadder,
                         ::testing::Combine(::testing::Values("c0_scalar", "c1_blocked", "c2_simd", "c3_threads"),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& climb) { return std::get<0>(climb.param) + "_" + std::get<1>(climb.param).name; });

}  // namespace
}  // namespace flash_attention::testing
