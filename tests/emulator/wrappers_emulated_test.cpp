#include <gtest/gtest.h>

#include "emulator/compare.h"
#include "emulator/emulate.h"
#include "emulator/wrapper_cases.h"

namespace flash_attention::testing {
namespace {

using Wrapper = ::testing::TestWithParam<WrapperCase>;

TEST_P(Wrapper, DoesWhatTheInstructionDoes) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_output(GetParam(), emulate(GetParam(), seed));
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Emulated, Wrapper, ::testing::ValuesIn(wrapper_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace flash_attention::testing
