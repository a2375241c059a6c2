#pragma once

#include <cstdint>
#include <string_view>

#include "check/call.h"

namespace flash_attention::check {

/// Compares some rows of what a call has written with fp64: out and lse, or dq, dk, dv, dbias and dsink. Among them are the
/// first and the last of the first and of the last head; `seed`, another number for each call, chooses the others. The work
/// is bounded whatever the problem. Throws Error(internal) that names the problem, the kernel, the row, what was got and
/// expected.
void check(const Call& call, Pass pass, std::string_view kernel, std::uint64_t seed);

}  // namespace flash_attention::check
