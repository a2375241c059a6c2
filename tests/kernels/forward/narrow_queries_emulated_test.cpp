// Q, K and V in 8 bits, in the emulator.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

class NarrowQueriesPortable : public ::testing::TestWithParam<Case> {};

TEST_P(NarrowQueriesPortable, Portable) { check_emulated(GetParam(), "forward/portable", Pass::forward); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, NarrowQueriesPortable,
                         ::testing::ValuesIn(some_of(narrow_query_cases(Dtype::bfloat16), 6)), case_name);

}  // namespace
}  // namespace flash_attention::testing
