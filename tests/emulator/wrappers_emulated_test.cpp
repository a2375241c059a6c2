#include <gtest/gtest.h>

#include "emulator/compare.h"
#include "emulator/together.h"
#include "emulator/wrapper_cases.h"

namespace flash_attention::testing {
namespace {

using Wrapper = ::testing::TestWithParam<WrapperCase>;

TEST_P(Wrapper, DoesWhatTheInstructionDoes) {
  static Together all(wrapper_cases());
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_output(GetParam(), all.run(GetParam().name, seed));
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Emulated, Wrapper, ::testing::ValuesIn(wrapper_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace flash_attention::testing
