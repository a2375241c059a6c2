#pragma once

#include <vector>

#include "support/cases/contract.h"
#include "support/oracle/case_programs.h"
#include "support/oracle/derivatives.h"

// Which cases have forward mode and second derivatives, and how a kernel's are compared: with differences of the oracle in
// fp64.

namespace flash_attention::testing {

inline bool has_derivatives(const Case& c) {
  const Problem& p = c.problem;
  return p.key_list.kind == KeyListKind::none && !p.invariant && !p.return_max_logit && !p.return_key_mass &&
         !p.return_entropy &&
         (c.program == CaseProgram::none || c.program == CaseProgram::dilated || c.program == CaseProgram::documents) &&
         c.draw != Draw::huge && !c.lowest_bias &&  // fp64 has no room for a difference of such scores, either
         c.problem.k_strides.batch != 0;            // sequences that share keys would share their tangents
}

/// Of the contract and of the masks.
inline std::vector<Case> derivative_cases(Dtype dtype) {
  std::vector<Case> all;
  for (const auto& list : {contract_cases(dtype), mask_cases(dtype)}) {
    for (const Case& c : list) {
      if (has_derivatives(c)) all.push_back(c);
    }
  }
  return all;
}

/// Kernels for tensor cores.
inline bool rounds_weights(const Target& target) { return target.kernel.ends_with("/sm80") || target.kernel.ends_with("/sm90"); }

inline void expect_derivatives(const Case& c, const Target& target, const Inputs& in, const Inputs& tangents,
                               const Results& got, const Results& want) {
  Results more;  // keys that bring about large scores are far larger than what is left of them in dq
  if (rounds_weights(target) && target.pass == Pass::second && c.draw != Draw::normal)
    more = rounding_of_second(c, in, tangents);
  for (const std::string& line : wrong_derivatives(c, got, want, rounds_weights(target), more)) ADD_FAILURE() << line;
  if (target.pass == Pass::second) return;
  const Results plain = oracle(c, in, false, c.problem.dtype), exact = oracle(c, in, false);
  compare("out", got.out, exact.out, plain.out, c.problem.dtype);
  compare("lse", got.lse, exact.lse, plain.lse, Dtype::float32);
}

inline void check_derivatives(const Case& c, const Target& target) {
  const Inputs in = draw_inputs(c), tangents = draw_tangents(c, in);
  const Results want = derivatives(c, in, tangents, target.pass);
  const Outcome outcome = attempt_derivatives(c, target, in, tangents);
  EXPECT_EQ(outcome.written_gap, "");
  expect_derivatives(c, target, in, tangents, outcome.results, want);
}

/// Options in pairs that no case has.
inline Case all_at_once(Dtype dtype = Dtype::float32) {
  Case c;
  c.name = "all_at_once";
  Problem& p = c.problem;
  p = {.batch = 2, .seq_q = 131, .seq_kv = 199, .heads_q = 6, .heads_kv = 2, .head_dim = 40, .head_dim_v = 24};
  p.dtype = dtype;
  p.causal = p.alibi = p.sink = c.dsink = c.dlse = c.dbias = true;
  p.softcap = 2.5f, p.dropout_p = 0.3f, p.window_left = 90;
  p.bias = {.present = true, .dtype = dtype, .head_stride = 131 * 199, .q_stride = 199};
  return c;
}

/// A program that changes scores and hides some; forward mode only.
inline Case programmed(Dtype dtype) {
  Case c;
  c.name = "programmed", c.program = CaseProgram::both;
  c.problem = {.batch = 2, .seq_q = 67, .seq_kv = 131, .heads_q = 4, .heads_kv = 2, .head_dim = 24, .head_dim_v = 40};
  c.problem.dtype = dtype, c.problem.softcap = 3;
  describe_program(c);
  return c;
}

/// Tangents of q, k or v alone: those that are not given are 0.
inline void check_each_tangent_alone(const Case& c, const Target& target) {
  const Inputs in = draw_inputs(c), all = draw_tangents(c, in);
  for (const auto part : {&Inputs::q, &Inputs::k, &Inputs::v}) {
    Inputs given, zeros = all;
    given.*part = all.*part;
    for (const auto other : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::bias, &Inputs::sink}) {
      if (other != part) (zeros.*other).assign((zeros.*other).size(), 0.0);
    }
    const Results want = derivatives(c, in, zeros, target.pass);
    const Results got = attempt_derivatives(c, target, in, given).results;
    for (const std::string& line : wrong_derivatives(c, got, want, rounds_weights(target)))
      ADD_FAILURE() << line;
  }
}

/// The same bits in every run.
inline void check_derivatives_reproducible(const Case& c, const Target& target) {
  const Inputs in = draw_inputs(c), tangents = draw_tangents(c, in);
  const Results one = attempt_derivatives(c, target, in, tangents).results;
  EXPECT_EQ(first_changed(one, attempt_derivatives(c, target, in, tangents).results), "");
}

/// second/sm80 and second/sm90 take no dropout.
inline Case without_dropout(Case c) {
  c.problem.dropout_p = 0;
  return c;
}

}  // namespace flash_attention::testing
