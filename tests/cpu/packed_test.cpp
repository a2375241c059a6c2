#include <gtest/gtest.h>

#include "support/cases/contract.h"

// Packed sequences of which only the total is known: what kernels keep of each lies close behind the one before.

namespace flash_attention::testing {
namespace {

Case packed_case(const char* name, Dtype dtype, std::vector<std::int32_t> q, std::vector<std::int32_t> kv) {
  Case c;
  c.name = name;
  Problem& p = c.problem;
  p = {.heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = dtype, .packed = true};
  p.batch = static_cast<std::int64_t>(q.size());
  p.causal = true;
  for (const auto& [lengths, starts] : {std::pair{&q, &c.cu_seqlens_q}, {&kv, &c.cu_seqlens_kv}}) {
    starts->push_back(0);
    for (const std::int32_t length : *lengths) starts->push_back(starts->back() + length);
  }
  p.seq_q = p.total_q = c.cu_seqlens_q.back();
  p.seq_kv = p.total_kv = c.cu_seqlens_kv.back();
  return c;
}

std::vector<Case> packed_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    cases.push_back(packed_case("mixed", dtype, {5, 0, 64, 1, 130, 63, 17}, {5, 3, 64, 0, 130, 65, 128}));
    cases.push_back(packed_case("ones", dtype, std::vector<std::int32_t>(70, 1), std::vector<std::int32_t>(70, 1)));
    cases.push_back(packed_case("one_short_of_a_tile", dtype, {63, 63, 63, 63}, {127, 15, 127, 15}));
  }
  return cases;
}

using TotalOnly = ::testing::TestWithParam<Case>;

TEST_P(TotalOnly, MatchesTheOracle) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::standard_forward, Pass::standard_backward}) {
    check(GetParam(), {.pass = pass});
  }
}

INSTANTIATE_TEST_SUITE_P(All, TotalOnly, ::testing::ValuesIn(packed_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
