#pragma once

#include "api/prepared.h"

namespace flash_attention::api {

/// FLASH_ATTENTION_CHECK=1: waits for the call that has just been made and compares some rows of its results with fp64.
/// Throws Error(internal) where they differ. A call that is captured into a graph has not been made yet and is skipped.
void watch(const Prepared& prepared, const Buffers& buffers, const Options& options);

}  // namespace flash_attention::api
