#pragma once

#include "abi/args.h"
#include "flash_attention/attention.h"

namespace flash_attention::launch {

/// The kernel parameter of a call, without tensor maps. Does not read the memory of the pointers.
abi::AttentionArgs make_arguments(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options);

}  // namespace flash_attention::launch
