#pragma once

// Sums and maxima over a warp. In step n a lane takes the value of the lane whose number differs in bit n: after five steps
// all 32 lanes have the result.

#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace flash_attention {

/// The sum, or the maximum, over the lanes of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) value += ptx::shuffle_xor(value, lane);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) value = ptx::max(value, ptx::shuffle_xor(value, lane));
  return value;
}

}  // namespace flash_attention
