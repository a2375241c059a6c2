#pragma once

#include "abi/args.h"
#include "ptx/atomic.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"

// The largest score of a sequence and head. All blocks that have rows of it raise it.

namespace flash_attention::tile {

__device__ __forceinline__ float larger_or_nan(float x, float y) { return x != x || x >= y ? x : y; }

/// Raises args.max_logit of the head. A NaN stays. Floats of one sign are ordered in the same way as their bits.
__device__ __forceinline__ void raise_largest(const abi::AttentionArgs& args, int batch_idx, int head_idx, float score) {
  float* const largest = args.max_logit + static_cast<long long>(batch_idx) * args.heads_q + head_idx;
  const float value = score != score ? nan : score + 0.0f;  // -0 becomes 0
  if (value < 0) {
    ptx::reduce_min(reinterpret_cast<unsigned*>(largest), __builtin_bit_cast(unsigned, value));
  } else {
    ptx::reduce_max(reinterpret_cast<int*>(largest), __builtin_bit_cast(int, value));
  }
}

/// The same for a whole warp, whose lanes have rows of one head. Groups of four lanes have the same rows.
__device__ __forceinline__ void raise_largest_of_warp(const abi::AttentionArgs& args, int batch_idx, int head_idx, int lane,
                                                      float score) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) score = larger_or_nan(score, ptx::shuffle_xor(score, lanes));
  if (lane == 0) raise_largest(args, batch_idx, head_idx, score);
}

}  // namespace flash_attention::tile
