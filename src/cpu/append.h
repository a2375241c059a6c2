#pragma once

#include "flash_attention/append.h"

namespace flash_attention::cpu {

/// The call for a normalised problem whose pointers, lengths and tables have been looked at.
void append(const AppendProblem& problem, const AppendBuffers& buffers);

/// The gradients of one with in_rows.
void append_backward(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients);

}  // namespace flash_attention::cpu
