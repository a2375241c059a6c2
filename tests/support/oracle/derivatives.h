#pragma once

#include "support/oracle/attempt.h"

namespace flash_attention::testing {

/// Tangents of q, k, v, bias and sink in the form of their Inputs; NaN where those are not finite and not seen.
Inputs draw_tangents(const Case& c, const Inputs& in);

/// What Pass::tangent or Pass::second has to give, by differences of the oracle in fp64: of its forward pass (out_tangent
/// and lse_tangent) along the tangents, and for Pass::second of its backward pass, whose matrix of derivatives is
/// symmetric.
Results derivatives(const Case& c, const Inputs& in, const Inputs& tangents, Pass pass);

/// What a call of that pass gave; a kernel is named by the target. Tangents without elements are not given.
Outcome attempt_derivatives(const Case& c, const Target& target, const Inputs& in, const Inputs& tangents);

/// One line for each of the first few elements that are wrong. A kernel for tensor cores rounds probabilities, and what is
/// made of them, to the case's type: `rounds_weights`. Then sums over rows, whatever their type, have such errors of two
/// factors. `more` is allowed beside it.
std::vector<std::string> wrong_derivatives(const Case& c, const Results& got, const Results& want,
                                           bool rounds_weights = false, const Results& more = {});

/// The error that each element of dq and dk of second derivatives may have if probabilities, gradients of scores and
/// gradients of their tangents are rounded to the case's type. It is large if the keys nearly cancel in their weighted sum.
/// For dense cases without options of scores, with a key head for each head and one width.
Results rounding_of_second(const Case& c, const Inputs& in, const Inputs& tangents);

}  // namespace flash_attention::testing
