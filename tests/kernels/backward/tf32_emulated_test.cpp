#include "kernels/tf32_cases.h"

namespace flash_attention::testing {
namespace {

using BackwardTf32 = ::testing::TestWithParam<Case>;

TEST_P(BackwardTf32, Emulated) { check_emulated(GetParam(), "backward/tf32", Pass::backward); }

INSTANTIATE_TEST_SUITE_P(Masks, BackwardTf32, ::testing::ValuesIn(some_of(fast(mask_cases(Dtype::float32)), 20)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Float32, BackwardTf32, ::testing::ValuesIn(some_of(fast(contract_cases(Dtype::float32)), 24)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Deterministic, BackwardTf32,
                         ::testing::ValuesIn(some_of(deterministic(fast(contract_cases(Dtype::float32))), 60)), case_name);
INSTANTIATE_TEST_SUITE_P(Slopes, BackwardTf32, ::testing::ValuesIn(fast({contract_case("softcap_far", Dtype::float32)})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(NanGradients, BackwardTf32, ::testing::ValuesIn(some_of(fast(nan_gradients(Dtype::float32)), 8)),
                         case_name);

/// So few columns that some warps have none: they read nothing behind the tiles, where the next ones land.
std::vector<Case> few_columns() {
  std::vector<Case> cases;
  for (const std::int64_t dim : {8, 32}) {
    Case c = base(("few_columns_" + std::to_string(dim)).c_str(), Dtype::float32);
    c.problem.head_dim = c.problem.head_dim_v = dim;
    c.problem.batch = 1, c.problem.heads_q = 2, c.problem.heads_kv = 1, c.problem.seq_q = 70, c.problem.softcap = 3;
    cases.push_back(c);
  }
  return fast(cases);
}
INSTANTIATE_TEST_SUITE_P(FewColumns, BackwardTf32, ::testing::ValuesIn(few_columns()), case_name);

using BackwardTf32Accuracy = ::testing::TestWithParam<Case>;

TEST_P(BackwardTf32Accuracy, OfThreeProducts) {
  Case c = GetParam();
  c.problem.deterministic = c.problem.head_dim == 128;  // dQ by both of its kernels
  expect_fast_errors(c, DeviceKind::emulator, Pass::backward, "backward/portable", "backward/tf32",
                     {&Results::dq, &Results::dk, &Results::dv});
}
TEST_P(BackwardTf32Accuracy, OfOneProduct) {
  expect_tf32_errors(GetParam(), DeviceKind::emulator, Pass::backward, "backward/tf32",
                     {&Results::dq, &Results::dk, &Results::dv});
}
INSTANTIATE_TEST_SUITE_P(Draws, BackwardTf32Accuracy, ::testing::ValuesIn(accuracy_cases()), case_name);

TEST(BackwardTf32Numbers, TinyValuesKeepTheirBits) {
  expect_fast_errors(accuracy_cases().front(), DeviceKind::emulator, Pass::backward, "backward/portable", "backward/tf32",
                     {&Results::dq, &Results::dk, &Results::dv}, 0x1p-99);
}

/// Infinite and huge numbers mean what they mean in fp32.
TEST(BackwardTf32Numbers, AreThoseOfFp32) {
  for (const ExtremeCase& extreme : extreme_cases()) {
    SCOPED_TRACE(extreme.c.name);
    expect_same_numbers(extreme, DeviceKind::emulator, Pass::backward, "backward/tf32");
  }
}

}  // namespace
}  // namespace flash_attention::testing
