#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

class ListedGpu : public ::testing::TestWithParam<Case> {};

TEST_P(ListedGpu, Forward) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "forward/listed"});
}
TEST_P(ListedGpu, Backward) {
  REQUIRE_GPU(70);
  check(GetParam(), {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/listed", .pass = Pass::backward});
  check_reproducible(GetParam(),
                     {.device = {.kind = DeviceKind::cuda}, .kernel = "backward/listed", .pass = Pass::backward});
}

INSTANTIATE_TEST_SUITE_P(Float32, ListedGpu, ::testing::ValuesIn(list_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, ListedGpu, ::testing::ValuesIn(list_cases(Dtype::bfloat16)), case_name);

}  // namespace
}  // namespace flash_attention::testing
