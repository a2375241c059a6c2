#pragma once

#include "abi/config.h"
#include "flash_attention/problem.h"

namespace flash_attention::plan {

/// The compile-time features of a normalised problem.
abi::Features features_of(const Problem& problem);

/// What kernels that know rows, and nothing of scores, are compiled for: problems that differ in options of scores share
/// them.
abi::Features row_features(const abi::Features& features);

/// Those of a forward kernel: key masses are computed by a launch behind it.
inline abi::Features forward_features(abi::Features features) {
  features.key_mass = false;
  return features;
}

/// Those of the launch that computes key masses: only what it reads, fewer kernels to compile.
inline abi::Features key_mass_features(abi::Features features) {
  features.dropout = features.sink = features.max_logit = features.entropy = features.one_product = false;
  return features;
}

/// The same for kernels that read a map of the tiles of a boolean mask (abi/tile_map.h).
abi::Features with_map(abi::Features features);

/// Query heads, or groups of them, and batch entries whose masks differ.
std::int64_t map_heads(const Problem& problem);
std::int64_t map_batches(const Problem& problem);

}  // namespace flash_attention::plan
