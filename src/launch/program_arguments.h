#pragma once

#include "abi/program.h"
#include "flash_attention/attention.h"

namespace flash_attention::launch {

/// The arguments of the program: scalars, tensors, and the addresses of its gradients.
abi::ProgramArgs program_arguments(const Problem& problem, const Plan& plan, const Buffers& buffers,
                                   const Options& options);

}  // namespace flash_attention::launch
