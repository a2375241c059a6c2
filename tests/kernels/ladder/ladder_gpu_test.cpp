#include "kernels/ladder/rungs.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using Ladder = ::testing::TestWithParam<Climb>;

TEST_P(Ladder, Gpu) {
  const auto& [rung, c] = GetParam();
  REQUIRE_GPU(rung.arch);
  check(c, {.device = {.kind = DeviceKind::cuda}, .kernel = std::string(rung.name), .pass = rung.pass});
}

INSTANTIATE_TEST_SUITE_P(Forward, Ladder, ::testing::ValuesIn(climbs(Pass::forward)), climb_name);
INSTANTIATE_TEST_SUITE_P(Backward, Ladder, ::testing::ValuesIn(climbs(Pass::backward)), climb_name);

}  // namespace
}  // namespace flash_attention::testing
