#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"

// Online softmax on an accumulator fragment float[blocks][4] (tile/mma.cuh): a lane holds a part of rows g and g + 8, the
// four lanes of a group hold all of both.

namespace flash_attention::tile {

template <typename Combine>
__device__ __forceinline__ float reduce_quad(float value, Combine combine) {
  value = combine(value, ptx::shuffle_xor(value, 1));
  return combine(value, ptx::shuffle_xor(value, 2));
}

/// From the maximum (in powers of two) and the sum of a row: what its outputs are to be multiplied by, 0 for a row without
/// keys, and its log-sum-exp. The sink is -inf where there is none.
__device__ __forceinline__ float finish_row(float max, float sum, float sink, float& lse) {
  const float sink_log2 = sink * log2_e;
  const float new_max = ptx::max(max, sink_log2);
  const float reference = new_max == -infinity ? 0 : new_max;
  const float shrink = ptx::exp2(max - reference);
  const float new_total = ptx::fma(sum, shrink, ptx::exp2(sink_log2 - reference));
  lse = new_total == 0 ? -infinity : (new_max + ptx::log2(new_total)) * ln_2;
  // A sink may leave nothing of a row that has keys. It is not a row without keys: a NaN among its values shows.
  const float factor = shrink / new_total;
  return sum == 0 ? 0 : (factor == 0 ? smallest : factor);
}

/// The running maximum and sum of two rows. The maximum is in the units of the scores, the sum is this lane's part.
struct RowState {
  float max[2] = {-infinity, -infinity};
  float sum[2] = {0, 0};

  /// S becomes 2^lift exp(scale * (S - new maximum)), 0 where S is -inf. Returns in `shrink` what earlier sums and outputs
  /// are to be multiplied by. scale_log2 = scale * log2(e) > 0. Where scores may be of any size (`huge`), the maximum is
  /// taken off before the scale: the rounding error of their product would be an exponent. With `steady` a tile in which a
  /// row sees nothing changes no bit of it, not even by that rounding error.
  template <int lift = 0, bool huge = false, bool steady = false, int blocks>
  __device__ __forceinline__ void update(float (&S)[blocks][4], float scale_log2, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[half];
#pragma unroll
      for (int n = 0; n < blocks; ++n) new_max = ptx::max(new_max, ptx::max(S[n][2 * half], S[n][2 * half + 1]));
      new_max = reduce_quad(new_max, [](float a, float b) { return ptx::max(a, b); });
      // A row that has seen nothing keeps finite arithmetic: exp2(-inf - 0) = 0.
      const float reference = new_max == -infinity ? 0 : new_max * scale_log2;
      const float origin = new_max == -infinity ? 0 : new_max;
      shrink[half] = ptx::exp2(huge ? (max[half] - origin) * scale_log2 : ptx::fma(max[half], scale_log2, -reference));
      if (steady && max[half] == new_max) shrink[half] = 1;
      max[half] = new_max;
      const float lifted = reference - lift;
      float total = 0;
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          S[n][e] = ptx::exp2(huge ? ptx::fma(S[n][e] - origin, scale_log2, static_cast<float>(lift))
                                   : ptx::fma(S[n][e], scale_log2, -lifted));
          total += S[n][e];
        }
      }
      sum[half] = ptx::fma(sum[half], shrink[half], total);
    }
  }

  /// finish_row() for row `half`.
  template <int lift = 0>
  __device__ __forceinline__ float finish(int half, float scale_log2, float sink, float& lse) const {
    const float total = reduce_quad(sum[half], [](float a, float b) { return a + b; });
    const float scaled_max = max[half] == -infinity ? -infinity : max[half] * scale_log2 - lift;
    return finish_row(scaled_max, total, sink, lse);
  }
};

}  // namespace flash_attention::tile
