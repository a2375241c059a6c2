#include "support/append_check.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using GpuAppend = ::testing::TestWithParam<AppendCase>;

TEST_P(GpuAppend, EqualsTheFormulas) {
  REQUIRE_GPU(70);
  check_append(GetParam(), {.kind = DeviceKind::cuda});
}

using GpuAppendGradients = ::testing::TestWithParam<AppendCase>;

TEST_P(GpuAppendGradients, EqualTheJacobian) {
  REQUIRE_GPU(70);
  check_append_gradients(GetParam(), {.kind = DeviceKind::cuda});
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuAppendGradients, ::testing::ValuesIn(append_gradient_cases()),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, GpuAppend, ::testing::ValuesIn(append_cases()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace flash_attention::testing
