// K and V of 8 bits on the CPU have the bits of 16-bit ones; that they are right, contract_test.cpp says.
#include "support/cases/contract.h"

namespace flash_attention::testing {
namespace {

using CpuNarrowKeys = ::testing::TestWithParam<Case>;

TEST_P(CpuNarrowKeys, DecodeHasTheBitsOfSixteen) { check_narrow_bits(GetParam(), {.device = {}, .kernel = "cpu/decode"}); }
TEST_P(CpuNarrowKeys, PrefillHasTheBitsOfSixteen) {
  check_narrow_bits(GetParam(), {.device = {}, .kernel = "cpu/prefill"});
}

std::vector<Case> of_every_type() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
    for (Case c : narrow_key_cases(dtype)) {
      c.name += "_" + std::string(to_string(dtype));
      cases.push_back(c);
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuNarrowKeys, ::testing::ValuesIn(of_every_type()), case_name);

}  // namespace
}  // namespace flash_attention::testing
