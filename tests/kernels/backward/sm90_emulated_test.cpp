// backward/sm90 in the emulator: the whole contract, under several schedules, with sums in memory and without.
#include "emulator/seed.h"
#include "support/contract.h"

namespace flash_attention::testing {
namespace {

const Target target{
    .device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = "backward/sm90", .pass = Pass::backward};

class BackwardSm90 : public ::testing::TestWithParam<Case> {};

TEST_P(BackwardSm90, KeepsTheContract) {
  for (const std::uint64_t seed : {1, 2}) {
    emulator::set_seed(seed);
    check(GetParam(), target);
  }
}

class BackwardSm90Deterministic : public ::testing::TestWithParam<Case> {};

TEST_P(BackwardSm90Deterministic, KeepsTheContract) {
  Case c = GetParam();
  c.problem.deterministic = true;
  emulator::set_seed(3);
  check(c, target);
}

/// The structures differ in how they walk and what they must not multiply, not in dtype: a part of the cases is enough.
std::vector<Case> walking_cases() {
  std::vector<Case> cases = contract_cases(Dtype::bfloat16);
  std::erase_if(cases, [](const Case& c) {
    for (const char* name : {"plain", "gqa", "causal", "window", "mask_shared", "seqused", "packed_causal", "softcap",
                             "dropout", "nan_key", "nan_value", "head_dim_40"}) {
      if (c.name == name) return false;
    }
    return true;
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90, ::testing::ValuesIn(contract_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BackwardSm90, ::testing::ValuesIn([] {
                           std::vector<Case> cases = contract_cases(Dtype::float16);
                           cases.resize(12);  // the sizes
                           return cases;
                         }()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, BackwardSm90Deterministic, ::testing::ValuesIn(walking_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
