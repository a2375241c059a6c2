#pragma once

#include "abi/append.h"
#include "flash_attention/append.h"

namespace flash_attention::launch {

/// The parameter of decode/append. Does not read the memory of the pointers.
abi::AppendArgs make_arguments(const AppendProblem& problem, const AppendBuffers& buffers);

/// The parameter of decode/append_gradient and of decode/append_weights.
abi::AppendGradientArgs make_arguments(const AppendProblem& problem, const AppendBuffers& buffers,
                                       const AppendGradients& gradients);

}  // namespace flash_attention::launch
