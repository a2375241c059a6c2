#include "kernels/emulated.h"
#include "kernels/ladder/rungs.h"

namespace flash_attention::testing {
namespace {

using Ladder = ::testing::TestWithParam<Climb>;

TEST_P(Ladder, Emulated) {
  const auto& [rung, c] = GetParam();
  emulator::set_num_sms(2);  // so that blocks that stay on their SM take several tiles
  emulator::set_seed(std::hash<std::string>{}(c.name));
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = rung.arch},
            .kernel = std::string(rung.name),
            .pass = rung.pass});
}

INSTANTIATE_TEST_SUITE_P(Forward, Ladder, ::testing::ValuesIn(climbs(Pass::forward)), climb_name);
INSTANTIATE_TEST_SUITE_P(Backward, Ladder, ::testing::ValuesIn(climbs(Pass::backward)), climb_name);

}  // namespace
}  // namespace flash_attention::testing
