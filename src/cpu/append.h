#pragma once

#include "flash_attention/append.h"

namespace flash_attention::cpu {

/// Runs a call whose problem is normalised and whose pointers, lengths and tables have been checked.
void append(const AppendProblem& problem, const AppendBuffers& buffers);

/// Computes the gradients of a call with in_rows.
void append_backward(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients);

}  // namespace flash_attention::cpu
