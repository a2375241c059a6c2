#pragma once

#include "cpu/call.h"
#include "plan/kernel.h"

namespace flash_attention::cpu {

/// The normalised problem and its pointers, as the kernels see them.
Call make_call(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options);

/// Less work than waking a thread is worth.
bool is_small(const Problem& problem);

}  // namespace flash_attention::cpu
