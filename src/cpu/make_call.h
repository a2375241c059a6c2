#pragma once

#include "cpu/call.h"
#include "plan/kernel.h"

namespace flash_attention::cpu {

/// The normalised problem and its pointers, as kernels with blocks of `block_q` rows see them.
Call make_call(const Problem& problem, const Plan& plan, int block_q, const Buffers& buffers, const Options& options);

/// Less work than waking a thread is worth.
bool is_small(const Problem& problem, Pass pass);

}  // namespace flash_attention::cpu
