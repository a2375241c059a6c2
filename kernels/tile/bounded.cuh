#pragma once

// How large and how small scores may be, so that what softmax makes of them is finite.

#include "tile/element.cuh"
#include "tile/math.cuh"

namespace flash_attention::tile {

/// The largest score, which stays finite when softmax multiplies it by log2 e.
constexpr float largest_score = 2.3e38f;

/// A bias as it is added: finite ones stay so.
template <Type type>
__device__ __forceinline__ float bounded_bias(ptx::Element<type> value) {
  constexpr float largest = largest_score;
  const float bias = ptx::to_float(value);
  if constexpr (type == Type::float16) return bias;
  const float magnitude = ptx::abs(bias);
  return magnitude > largest && magnitude < infinity ? (bias < 0 ? -largest : largest) : bias;
}

/// Backward makes probabilities from lse. Below this one, which only a bias can bring about, a float has no room for the
/// sum next to the maximum: such a row counts as one without keys.
constexpr float lowest_lse = -1e7f;

}  // namespace flash_attention::tile
