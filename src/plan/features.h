#pragma once

#include "abi/config.h"
#include "flash_attention/problem.h"

namespace flash_attention::plan {

/// The compile-time features of a normalised problem.
abi::Features features_of(const Problem& problem);

/// The features of kernels that know rows and nothing of scores. Problems that differ only in options of scores share
/// these kernels.
abi::Features row_features(const abi::Features& features);

/// The features of a forward kernel, without key masses: a later launch computes them.
inline abi::Features forward_features(abi::Features features) {
  features.key_mass = false;
  return features;
}

/// The features of the launch that computes key masses: only those that it reads, so that fewer kernels are compiled.
inline abi::Features key_mass_features(abi::Features features) {
  features.dropout = features.sink = features.max_logit = features.entropy = features.one_product = false;
  return features;
}

/// The same features for kernels that read a map of the tiles of a boolean mask (abi/tile_map.h).
abi::Features with_map(abi::Features features);

/// The number of query heads, or groups of them, and of batch entries whose masks differ.
std::int64_t map_heads(const Problem& problem);
std::int64_t map_batches(const Problem& problem);

}  // namespace flash_attention::plan
