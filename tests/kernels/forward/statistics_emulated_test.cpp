#include "kernels/emulated.h"

// Statistics of every kernel that computes them, and their gradients.

namespace flash_attention::testing {
namespace {

using PortableStatistics = ::testing::TestWithParam<Case>;
using Sm80Statistics = ::testing::TestWithParam<Case>;
using Sm90Statistics = ::testing::TestWithParam<Case>;

TEST_P(PortableStatistics, Forward) { check_emulated(GetParam(), "forward/portable", Pass::forward); }
TEST_P(PortableStatistics, Backward) { check_emulated(GetParam(), "backward/portable", Pass::backward); }
TEST_P(Sm80Statistics, Forward) { check_emulated(GetParam(), "forward/sm80", Pass::forward); }
TEST_P(Sm90Statistics, Forward) { check_sm90(GetParam(), "forward/sm90", Pass::forward, 2); }

INSTANTIATE_TEST_SUITE_P(Float32, PortableStatistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::float32), 6, 1)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Sm80Statistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::bfloat16), 5, 0)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Sm90Statistics, ::testing::ValuesIn(share_of(statistics_cases(Dtype::bfloat16), 5, 3)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
