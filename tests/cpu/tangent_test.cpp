#include <gtest/gtest.h>

#include "support/cases/derivative_cases.h"

// Forward mode and second derivatives of the contract's cases, compared with differences of the oracle in fp64.

namespace flash_attention::testing {
namespace {

using CpuDerivatives = ::testing::TestWithParam<Case>;

TEST_P(CpuDerivatives, Tangent) { check_derivatives(GetParam(), {.pass = Pass::tangent}); }
TEST_P(CpuDerivatives, Second) { check_derivatives(GetParam(), {.pass = Pass::second}); }

INSTANTIATE_TEST_SUITE_P(Float32, CpuDerivatives, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float32), 2)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, CpuDerivatives, ::testing::ValuesIn(some_of(derivative_cases(Dtype::bfloat16), 7)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, CpuDerivatives, ::testing::ValuesIn(some_of(derivative_cases(Dtype::float16), 11)), case_name);

TEST(CpuDerivatives, AllAtOnce) {
  for (const Pass pass : {Pass::tangent, Pass::second}) check_derivatives(all_at_once(), {.pass = pass});
  check_derivatives(programmed(Dtype::float32), {.pass = Pass::tangent});
}

TEST(CpuDerivatives, SameBits) {
  for (const Pass pass : {Pass::tangent, Pass::second}) check_derivatives_reproducible(all_at_once(), {.pass = pass});
}

TEST(CpuDerivatives, EachTangentAlone) {
  for (const Pass pass : {Pass::tangent, Pass::second}) check_each_tangent_alone(all_at_once(), {.pass = pass});
}

/// What has none is refused by name.
TEST(CpuDerivatives, Refusals) {
  const auto refused = [](const Problem& p, Pass pass) -> std::string {
    try {
      make_plan(p, pass, device_info({}));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Problem p{.seq_q = 5, .seq_kv = 5, .head_dim = 16};
  for (const Pass pass : {Pass::tangent, Pass::second}) {
    EXPECT_EQ(refused(p, pass), "");
    Problem statistics = p;
    statistics.return_entropy = true;
    EXPECT_NE(refused(statistics, pass).find("return_entropy"), std::string::npos);
    Problem lists = p;
    lists.key_list = {.kind = KeyListKind::keys, .entries = 2};
    EXPECT_NE(refused(lists, pass).find("key_indices"), std::string::npos);
    Problem pages = p;
    pages.page_size = 8, pages.num_pages = 1;
    EXPECT_NE(refused(pages, pass).find("page_size"), std::string::npos);
    Problem invariant = p;
    invariant.invariant = true;
    EXPECT_NE(refused(invariant, pass).find("bits are invariant"), std::string::npos);
  }
  Problem program = p;
  program.program = "v0 = sin score\nscore = v0";
  EXPECT_EQ(refused(program, Pass::tangent), "");
  EXPECT_NE(refused(program, Pass::second).find("program"), std::string::npos);
}

}  // namespace
}  // namespace flash_attention::testing
