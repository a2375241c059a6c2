#pragma once

#include "flash_attention/append.h"

namespace flash_attention::api {

/// Refuses a problem that breaks the contract and fills in every default.
AppendProblem normalise(const AppendProblem& problem);

/// Refuses pointers, and where the host can see them lengths, places, tables and scales, that do not fit the normalised
/// problem.
void validate(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options);

/// The same for what append_backward takes besides.
void validate(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients, Device device);

}  // namespace flash_attention::api
