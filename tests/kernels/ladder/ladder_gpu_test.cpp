#include "kernels/ladder/rungs.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

class Ladder : public ::testing::TestWithParam<Climb> {};

TEST_P(Ladder, Gpu) {
  const auto& [rung, c] = GetParam();
  REQUIRE_GPU(rung.arch);
  check(c, {.device = {.kind = DeviceKind::cuda}, .kernel = std::string(rung.name), .pass = rung.pass});
}

/// All cases but those of a NaN behind the mask, which a probability of zero multiplies; what a rung does not take is
/// skipped.
std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
    for (const Case& c : contract_cases(dtype)) {
      if (c.nan_value < 0) cases.push_back(c);
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Forward, Ladder, ::testing::ValuesIn(climbs(Pass::forward, cases())), climb_name);
INSTANTIATE_TEST_SUITE_P(Backward, Ladder, ::testing::ValuesIn(climbs(Pass::backward, cases())), climb_name);

}  // namespace
}  // namespace flash_attention::testing
