#pragma once

#include "abi/program.h"
#include "flash_attention/attention.h"

namespace flash_attention::launch {

/// What the program is given: scalars, tensors, and where its gradients go.
abi::ProgramArgs program_arguments(const Problem& problem, const Plan& plan, const Buffers& buffers,
                                   const Options& options);

}  // namespace flash_attention::launch
