#include <gtest/gtest.h>

#include "emulator/nvrtc.h"
#include "emulator/wrapper_cases.h"
#include "support/compile.h"

namespace flash_attention::testing {
namespace {

using Wrapper = ::testing::TestWithParam<WrapperCase>;

TEST_P(Wrapper, Assembles) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int arch : {80, 90}) {
    if (GetParam().arch > arch) continue;
    const auto result = compile_with_nvrtc(GetParam(), arch);
    EXPECT_TRUE(result.ok) << "sm_" << arch << "\n" << result.log;
  }
}

INSTANTIATE_TEST_SUITE_P(Nvrtc, Wrapper, ::testing::ValuesIn(wrapper_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace flash_attention::testing
