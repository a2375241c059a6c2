#pragma once

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Starts to compile what a later call will need, and returns. Does nothing where that call compiles nothing, and where it
/// would be refused: it will say so itself.
void compile_ahead(const Problem& problem, Pass pass, const Options& options);

}  // namespace flash_attention::api
