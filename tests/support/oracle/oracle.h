#pragma once

#include <optional>
#include <vector>

#include "support/oracle/case.h"

namespace flash_attention::testing {

/// Results in the logical order of Inputs: out and dq over [rows_q, heads_q, dim], dk and dv over [rows_kv, heads_kv, dim].
struct Results {
  std::vector<double> out, lse, dq, dk, dv, dbias, dsink;
  std::vector<double> max_logit, key_mass, entropy;  // statistics that the problem has
  std::vector<double> out_tangent, lse_tangent;  // support/oracle/derivatives.h
  std::vector<double> dprogram;  // of the first tensor that the program reads
  double dbias_spread = 0;       // with rounding: the size of the errors that one sum of dbias has together
  double dprogram_spread = 0;    // the same of dprogram
  double dk_spread = 0;          // the same of dk where all elements of a key are one sum (Draw::ties)
};

/// docs/numerics.md in double precision, one loop per line of it. With `rounding`, dot products are accumulated in
/// float, and the operands of the second products (P, dS) and the results are rounded to that type, as any attention in
/// that type must: the yardstick of the tolerances.
Results oracle(const Case& c, const Inputs& in, bool backward, std::optional<Dtype> rounding = std::nullopt);

}  // namespace flash_attention::testing
