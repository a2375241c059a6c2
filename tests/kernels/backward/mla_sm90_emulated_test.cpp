// backward/mla_sm90: lists of keys whose values are the beginning of the keys, or tensors of their own.
#include "kernels/backward/mla_cases.h"
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

using MlaBackward = ::testing::TestWithParam<Case>;

TEST_P(MlaBackward, Emulated) { check_sm90(GetParam(), "backward/mla_sm90", Pass::backward, 3); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, MlaBackward, ::testing::ValuesIn(mla_backward_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
