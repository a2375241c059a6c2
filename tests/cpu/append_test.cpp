#include <gtest/gtest.h>

#include "flash_attention/error.h"
#include "support/append_check.h"

namespace flash_attention::testing {
namespace {

using CpuAppend = ::testing::TestWithParam<AppendCase>;

TEST_P(CpuAppend, EqualsTheFormulas) {
  if (!GetParam().without_room) return check_append(GetParam(), {});
  EXPECT_THROW(check_append(GetParam(), {}), Error);
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuAppend, ::testing::ValuesIn(append_cases()),
                         [](const auto& tested) { return tested.param.name; });

using CpuAppendGradients = ::testing::TestWithParam<AppendCase>;

TEST_P(CpuAppendGradients, EqualTheJacobian) { check_append_gradients(GetParam(), {}); }

INSTANTIATE_TEST_SUITE_P(Cases, CpuAppendGradients, ::testing::ValuesIn(append_gradient_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace flash_attention::testing
