#pragma once

#include "cpu/call.h"
#include "plan/kernel.h"

namespace flash_attention::cpu {

/// The normalised problem and its pointers, as kernels with blocks of `block_q` rows see them.
Call make_call(const Problem& problem, const Plan& plan, int block_q, const Buffers& buffers, const Options& options);

/// How much work a call is, in multiplications of a product at its peak: a million are about 25 us of a core with AVX-512.
double multiplications(const Problem& problem, Pass pass);

}  // namespace flash_attention::cpu
