#pragma once

#include "flash_attention/append.h"

namespace flash_attention::api {

/// Refuses a problem that breaks the contract and fills in every default.
AppendProblem normalise(const AppendProblem& problem);

/// Refuses pointers that do not fit the normalised problem; and lengths, places, tables and scales, if the host can see
/// them.
void validate(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options);

/// The same for the additional arguments of append_backward.
void validate(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients, Device device);

}  // namespace flash_attention::api
