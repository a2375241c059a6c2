#pragma once

// What options add to a score after its scaling: a bias read from memory, ALiBi worked out.

#include "abi/config.h"
#include "ptx/math.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

/// What bias and ALiBi add to the scores of a row, from the key that kv_begin + column is.
template <abi::Features features>
struct Added {
  const typename tile::Score<features>::Bias* bias;
  float slope;
  float distance;  // of the diagonal

  __device__ __forceinline__ Added(const tile::Score<features>& score, int q, int first_key) {
    if constexpr (features.bias) bias = score.bias + q * score.bias_stride + first_key;
    if constexpr (features.alibi) slope = score.slope;
    if constexpr (features.alibi) distance = static_cast<float>(q + score.len_kv - score.len_q - first_key);
  }
  __device__ __forceinline__ float at(int key) const {
    float result = 0;
    if constexpr (features.bias) result = tile::bounded_bias<features.bias_dtype>(bias[key]);
    if constexpr (features.alibi) result = ptx::fma(-slope, ptx::abs(distance - static_cast<float>(key)), result);
    return result;
  }
};

}  // namespace flash_attention::forward_sm90
