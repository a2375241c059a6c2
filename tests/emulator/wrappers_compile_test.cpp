#include <gtest/gtest.h>

#include <map>

#include "emulator/nvrtc.h"
#include "emulator/wrapper_cases.h"
#include "support/compile.h"

namespace flash_attention::testing {
namespace {

using Wrapper = ::testing::TestWithParam<WrapperCase>;

/// All cases of an architecture as one unit: half of the time that they take one after another.
bool compile_together(int arch) {
  std::set<std::string> headers;
  std::string kernels;
  for (const WrapperCase& c : wrapper_cases()) {
    if (!has_instructions(arch, c) || (arch >= 100 && c.arch < 100)) continue;
    headers.insert(c.headers.begin(), c.headers.end());
    kernels += kernel_in_namespace(c);
  }
  return compile_with_nvrtc(opening_of(headers) + kernels, "all", headers, arch).ok;
}

TEST_P(Wrapper, Assembles) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int arch : {80, 90, 100, 103}) {
    static std::map<int, bool> together;
    if (const auto [place, is_new] = together.try_emplace(arch); is_new) place->second = compile_together(arch);
    if (!has_instructions(arch, GetParam()) || together[arch]) continue;  // else each alone says which it is
    const auto result = compile_with_nvrtc(GetParam(), arch);
    EXPECT_TRUE(result.ok) << "sm_" << arch << "\n" << result.log;
  }
}

INSTANTIATE_TEST_SUITE_P(Nvrtc, Wrapper, ::testing::ValuesIn(wrapper_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace flash_attention::testing
