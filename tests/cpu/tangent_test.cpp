#include <gtest/gtest.h>

#include <cmath>

#include "support/cases/contract.h"
#include "support/oracle/derivatives.h"

// Forward mode and second derivatives of the contract's cases, compared with differences of the oracle in fp64.

namespace flash_attention::testing {
namespace {

bool has_derivatives(const Case& c) {
  const Problem& p = c.problem;
  return p.key_list.kind == KeyListKind::none && !p.invariant && !p.return_max_logit && !p.return_key_mass &&
         !p.return_entropy &&
         (c.program == CaseProgram::none || c.program == CaseProgram::dilated || c.program == CaseProgram::documents) &&
         c.draw != Draw::huge && !c.lowest_bias &&  // fp64 has no room for a difference of such scores, either
         c.problem.k_strides.batch != 0;            // sequences that share keys would share their tangents
}

std::vector<Case> cases(Dtype dtype, std::size_t one_in) {
  std::vector<Case> all;
  for (const auto& list : {contract_cases(dtype), mask_cases(dtype)}) {
    for (const Case& c : list) {
      if (has_derivatives(c)) all.push_back(c);
    }
  }
  return some_of(all, one_in);
}

void check_derivatives(const Case& c, Pass pass) {
  const Inputs in = draw_inputs(c), tangents = draw_tangents(c, in);
  const Results want = derivatives(c, in, tangents, pass);
  const Outcome outcome = attempt_derivatives(c, {.pass = pass}, in, tangents);
  EXPECT_EQ(outcome.written_gap, "");
  for (const std::string& line : wrong_derivatives(c, outcome.results, want)) ADD_FAILURE() << line;
  if (pass == Pass::second) return;
  const Results plain = oracle(c, in, false, c.problem.dtype), exact = oracle(c, in, false);
  compare("out", outcome.results.out, exact.out, plain.out, c.problem.dtype);
  compare("lse", outcome.results.lse, exact.lse, plain.lse, Dtype::float32);
}

using CpuDerivatives = ::testing::TestWithParam<Case>;

TEST_P(CpuDerivatives, Tangent) { check_derivatives(GetParam(), Pass::tangent); }
TEST_P(CpuDerivatives, Second) { check_derivatives(GetParam(), Pass::second); }

INSTANTIATE_TEST_SUITE_P(Float32, CpuDerivatives, ::testing::ValuesIn(cases(Dtype::float32, 2)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, CpuDerivatives, ::testing::ValuesIn(cases(Dtype::bfloat16, 7)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, CpuDerivatives, ::testing::ValuesIn(cases(Dtype::float16, 11)), case_name);

/// Options in pairs that no case has.
Case all_at_once() {
  Case c;
  c.name = "all_at_once";
  Problem& p = c.problem;
  p = {.batch = 2, .seq_q = 131, .seq_kv = 199, .heads_q = 6, .heads_kv = 2, .head_dim = 40, .head_dim_v = 24};
  p.causal = p.alibi = p.sink = c.dsink = c.dlse = c.dbias = true;
  p.softcap = 2.5f, p.dropout_p = 0.3f, p.window_left = 90;
  p.bias = {.present = true, .head_stride = 131 * 199, .q_stride = 199};
  return c;
}

TEST(CpuDerivatives, AllAtOnce) {
  for (const Pass pass : {Pass::tangent, Pass::second}) check_derivatives(all_at_once(), pass);
}

TEST(CpuDerivatives, SameBits) {
  const Case c = all_at_once();
  const Inputs in = draw_inputs(c), tangents = draw_tangents(c, in);
  for (const Pass pass : {Pass::tangent, Pass::second}) {
    const Results one = attempt_derivatives(c, {.pass = pass}, in, tangents).results;
    const Results two = attempt_derivatives(c, {.pass = pass}, in, tangents).results;
    EXPECT_EQ(first_changed(one, two), "");
  }
}

/// Tangents that are not given are 0.
TEST(CpuDerivatives, EachTangentAlone) {
  const Case c = all_at_once();
  const Inputs in = draw_inputs(c), all = draw_tangents(c, in);
  for (const auto part : {&Inputs::q, &Inputs::k, &Inputs::v}) {
    Inputs one = all;
    for (const auto other : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::bias, &Inputs::sink}) {
      if (other != part) (one.*other).assign((one.*other).size(), 0.0);
    }
    for (const Pass pass : {Pass::tangent, Pass::second}) {
      const Results want = derivatives(c, in, one, pass);
      const Results got = attempt_derivatives(c, {.pass = pass}, in, one).results;
      for (const std::string& line : wrong_derivatives(c, got, want)) ADD_FAILURE() << line;
    }
  }
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
