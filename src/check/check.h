#pragma once

#include <cstdint>
#include <string_view>

#include "check/call.h"

namespace flash_attention::check {

/// Compares some rows of a call's results with fp64: out and lse, or dq, dk, dv, dbias and dsink. It always includes
/// the first and the last row of the first and of the last head; `seed`, different for each call, chooses the others.
/// The work is bounded for every problem. Throws Error(internal), which names the problem, the kernel, the row, the
/// result and the expected number.
void check(const Call& call, Pass pass, std::string_view kernel, std::uint64_t seed);

}  // namespace flash_attention::check
