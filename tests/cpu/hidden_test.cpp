#include <gtest/gtest.h>

#include "support/cases/contract.h"

// NaN that a row holds stays with the row and the keys that it sees, and a sink of -inf is no sink.

namespace flash_attention::testing {
namespace {

Case causal_case(const char* name, Dtype dtype, std::int64_t seq_q) {
  Case c;
  c.name = name;
  c.problem = {.batch = 2, .seq_q = seq_q, .seq_kv = 131, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = dtype};
  c.problem.causal = true;
  return c;
}

/// Few rows, one block of them, and several.
std::vector<Case> nan_row_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const std::int64_t seq_q : {3, 19, 131}) {
      const std::string rows = "_of_" + std::to_string(seq_q);
      Case query = causal_case(("nan_query" + rows).c_str(), dtype, seq_q);
      query.nan_query = seq_q / 3;
      Case dout = causal_case(("nan_dout" + rows).c_str(), dtype, seq_q);
      dout.nan_dout = seq_q / 3;
      Case dropped = query;
      dropped.name = "nan_query_dropout" + rows;
      dropped.problem.dropout_p = 0.5f;
      cases.insert(cases.end(), {query, dout, dropped});
    }
  }
  return cases;
}

using NanRow = ::testing::TestWithParam<Case>;

TEST_P(NanRow, StaysWithTheKeysThatItSees) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::standard_backward}) check(GetParam(), {.pass = pass});
}

INSTANTIATE_TEST_SUITE_P(All, NanRow, ::testing::ValuesIn(nan_row_cases()), case_name);

/// More queries than keys: the first ones see none.
std::vector<Case> infinite_sink_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    Case c = causal_case("infinite_sink", dtype, 131);
    c.problem.seq_kv = 67;
    c.problem.sink = c.infinite_sink = c.dsink = true;
    Case few = c;
    few.name = "infinite_sink_of_few";
    few.problem.seq_q = 4;
    few.problem.seq_kv = 2;
    Case split = c;  // merged from parts
    split.name = "infinite_sink_split";
    split.problem.seq_q = 3;
    split.problem.seq_kv = 2000;
    split.problem.batch = split.problem.heads_kv = 1;
    split.problem.key_lengths = true;
    split.key_lengths = {0};
    cases.insert(cases.end(), {c, few, split});
  }
  return cases;
}

using InfiniteSink = ::testing::TestWithParam<Case>;

TEST_P(InfiniteSink, IsNoSink) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::standard_forward, Pass::standard_backward}) {
    check(GetParam(), {.pass = pass});
  }
}

INSTANTIATE_TEST_SUITE_P(All, InfiniteSink, ::testing::ValuesIn(infinite_sink_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
