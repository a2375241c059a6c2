#pragma once

#include "flash_attention/attention.h"
#include "launch/call.h"

namespace flash_attention::cpu {

/// The normalised problem and its pointers, in the form that kernels with blocks of `block_q` rows take.
Call make_call(const Problem& problem, const Plan& plan, int block_q, const Buffers& buffers, const Options& options);

}  // namespace flash_attention::cpu
