#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

class Listed : public ::testing::TestWithParam<Case> {};

TEST_P(Listed, Forward) { check_emulated(GetParam(), "forward/listed", Pass::forward); }
TEST_P(Listed, Backward) { check_emulated(GetParam(), "backward/listed", Pass::backward); }

INSTANTIATE_TEST_SUITE_P(Float32, Listed, ::testing::ValuesIn(share_of(list_cases(Dtype::float32), 2, 0)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, Listed, ::testing::ValuesIn(some_of(list_cases(Dtype::bfloat16), 12)), case_name);

}  // namespace
}  // namespace flash_attention::testing
