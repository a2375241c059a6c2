// The same on a GPU.
#include "kernels/prepared_masks.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using PreparedMasksOnGpu = ::testing::TestWithParam<PreparedCase>;

TEST_P(PreparedMasksOnGpu, GiveTheSameResults) {
  REQUIRE_GPU(GetParam().arch);
  check_prepared(GetParam(), {.kind = DeviceKind::cuda});
}

INSTANTIATE_TEST_SUITE_P(Kernels, PreparedMasksOnGpu, ::testing::ValuesIn(prepared_cases()), prepared_name);

}  // namespace
}  // namespace flash_attention::testing
