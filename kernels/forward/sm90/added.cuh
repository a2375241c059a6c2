#pragma once

// What options add to a score after its scaling: ALiBi worked out, next to a bias that is loaded or read here.

#include "abi/config.h"
#include "ptx/math.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

/// What ALiBi adds to the scores of a row, from the key that kv_begin + column is, and a bias where it `reads_bias`.
template <abi::Features features, bool reads_bias>
struct Added {
  const typename tile::Score<features>::Bias* bias_row;
  float slope;
  float distance;  // of the diagonal

  __device__ __forceinline__ Added(const tile::Score<features>& score, int q, int first_key) {
    if constexpr (reads_bias) bias_row = score.bias + q * score.bias_stride + first_key;
    if constexpr (features.alibi) slope = score.slope;
    if constexpr (features.alibi) distance = static_cast<float>(q + score.len_kv - score.len_q - first_key);
  }
  /// In addition to a bias that was loaded.
  __device__ __forceinline__ float at(int key, float bias) const {
    float result = bias;
    if constexpr (reads_bias) result = tile::bounded_bias<features.bias_dtype>(bias_row[key]);
    if constexpr (features.alibi) result = ptx::fma(-slope, ptx::abs(distance - static_cast<float>(key)), result);
    return result;
  }
};

}  // namespace flash_attention::forward_sm90
