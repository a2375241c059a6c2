// backward/sm90 with head dimensions above 256, in the emulator: two warpgroups with half of the columns each.
#include "kernels/emulated.h"
#include "kernels/wide_cases.h"

namespace flash_attention::testing {
namespace {

using BackwardSm90Columns = ::testing::TestWithParam<Case>;

TEST_P(BackwardSm90Columns, KeepTheContract) { check_sm90(GetParam(), "backward/sm90", Pass::backward, 2); }

INSTANTIATE_TEST_SUITE_P(Loops, BackwardSm90Columns, ::testing::ValuesIn(column_loops()), case_name);

}  // namespace
}  // namespace flash_attention::testing
