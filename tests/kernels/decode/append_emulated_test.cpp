// decode/append in the emulator.
#include <gtest/gtest.h>

#include "emulator/host/seed.h"
#include "flash_attention/error.h"
#include "support/append_check.h"

namespace flash_attention::testing {
namespace {

using EmulatedAppend = ::testing::TestWithParam<AppendCase>;

TEST_P(EmulatedAppend, EqualsTheFormulas) {
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  const Device device{.kind = DeviceKind::emulator, .emulated_arch = 80};
  if (!GetParam().without_room) return check_append(GetParam(), device);
  EXPECT_THROW(check_append(GetParam(), device), Error);  // the emulator's memory can be looked at
}

using EmulatedAppendGradients = ::testing::TestWithParam<AppendCase>;

TEST_P(EmulatedAppendGradients, EqualTheJacobian) {
  emulator::set_seed(std::hash<std::string>{}(GetParam().name));
  check_append_gradients(GetParam(), {.kind = DeviceKind::emulator, .emulated_arch = 80});
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedAppendGradients, ::testing::ValuesIn(append_gradient_cases()),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedAppend, ::testing::ValuesIn(append_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace flash_attention::testing
