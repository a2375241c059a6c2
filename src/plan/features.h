#pragma once

#include "abi/config.h"
#include "flash_attention/problem.h"

namespace flash_attention::plan {

/// The compile-time features of a normalised problem.
abi::Features features_of(const Problem& problem);

/// The same for kernels that read a map of the tiles of a boolean mask (abi/tile_map.h).
abi::Features features_with_map(const Problem& problem);

}  // namespace flash_attention::plan
