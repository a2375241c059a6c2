#include <gtest/gtest.h>

#include "support/cases/contract.h"

// Rows of bfloat16 that are no whole number of words apart, where products take words of two.

namespace flash_attention::testing {
namespace {

/// q, k and v lie in rows of their width and `gap` elements.
std::vector<Case> gap_cases() {
  std::vector<Case> cases;
  for (const std::int64_t seq_q : {2, 17, 40, 100}) {
    for (const std::int64_t head_dim : {32, 40, 128}) {
      for (const std::int64_t gap : {1, 2, 3}) {
        Case c;
        c.name = "gap_" + std::to_string(gap) + "_rows_" + std::to_string(seq_q) + "_dim_" + std::to_string(head_dim);
        c.problem = {.seq_q = seq_q, .seq_kv = 128, .head_dim = head_dim, .dtype = Dtype::bfloat16};
        Problem& p = c.problem;
        const std::int64_t row = head_dim + gap;
        p.q_strides = p.out_strides = p.dout_strides = p.dq_strides = {seq_q * row, row, row};
        p.k_strides = p.v_strides = p.dk_strides = p.dv_strides = {128 * row, row, row};
        cases.push_back(c);
      }
    }
  }
  return cases;
}

using OddRows = ::testing::TestWithParam<Case>;

TEST_P(OddRows, AreReadAsTheyLie) {
  for (const Pass pass : {Pass::forward, Pass::backward}) check(GetParam(), {.pass = pass});
}

INSTANTIATE_TEST_SUITE_P(All, OddRows, ::testing::ValuesIn(gap_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
