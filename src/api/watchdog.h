#pragma once

#include "api/prepared.h"

namespace flash_attention::api {

/// FLASH_ATTENTION_CHECK=1: waits for the call that has just been made, and compares some rows of its results with
/// fp64. Throws Error(internal) if they differ. Skips a call that is being captured into a graph, since it has not run
/// yet.
void watch(const Prepared& prepared, const Buffers& buffers, const Options& options);

}  // namespace flash_attention::api
