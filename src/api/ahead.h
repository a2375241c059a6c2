#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Begins to compile the kernels of a later call, and returns. Does nothing if that call compiles nothing, or would be
/// refused: the call itself then says why.
void compile_ahead(const Problem& problem, Pass pass, const Options& options);

}  // namespace flash_attention::api
