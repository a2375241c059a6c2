#include "support/cases/contract.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

using StatisticsGpu = ::testing::TestWithParam<Case>;
using StatisticsGradientsGpu = ::testing::TestWithParam<Case>;

Target on_gpu(const char* kernel, Pass pass) {
  return {.device = {.kind = DeviceKind::cuda}, .kernel = kernel, .pass = pass};
}

TEST_P(StatisticsGpu, Chosen) {
  REQUIRE_GPU(70);
  check(GetParam(), on_gpu("", Pass::forward));
}
TEST_P(StatisticsGpu, Sm80) {
  REQUIRE_GPU(80);
  check(GetParam(), on_gpu("forward/sm80", Pass::forward));
}
TEST_P(StatisticsGradientsGpu, Chosen) {
  REQUIRE_GPU(70);
  check(GetParam(), on_gpu("", Pass::backward));
}
TEST_P(StatisticsGpu, SameBits) {
  REQUIRE_GPU(70);
  check_reproducible(GetParam(), on_gpu("", Pass::forward));
}

INSTANTIATE_TEST_SUITE_P(Float32, StatisticsGradientsGpu, ::testing::ValuesIn(statistics_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Float32, StatisticsGpu, ::testing::ValuesIn(statistics_cases(Dtype::float32)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, StatisticsGpu, ::testing::ValuesIn(statistics_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, StatisticsGpu, ::testing::ValuesIn(some_of(statistics_cases(Dtype::float16), 4)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
