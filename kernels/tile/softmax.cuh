#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"

// Online softmax on an accumulator fragment float[blocks][4] (tile/mma.cuh). A lane holds a part of rows g and g + 8;
// the four lanes of a group together hold all of both rows.

namespace flash_attention::tile {

template <typename Combine>
__device__ __forceinline__ float reduce_quad(float value, Combine combine) {
  value = combine(value, ptx::shuffle_xor(value, 1));
  return combine(value, ptx::shuffle_xor(value, 2));
}

/// From the maximum (in powers of two) and the sum of a row: the factor of its outputs, 0 for a row without keys, and
/// its log-sum-exp. The sink is -inf if there is none.
__device__ __forceinline__ float finish_row(float max, float sum, float sink, float& lse) {
  const float sink_log2 = sink * log2_e;
  const float new_max = ptx::max(max, sink_log2);
  const float reference = new_max == -infinity ? 0 : new_max;
  const float rescale = ptx::exp2(max - reference);
  const float new_total = ptx::fma(sum, rescale, ptx::exp2(sink_log2 - reference));
  lse = new_total == 0 ? -infinity : (new_max + ptx::log2(new_total)) * ln_2;
  // A sink may be so large that the row's factor is 0. The row still has keys, so a NaN among its values must show.
  const float factor = rescale / new_total;
  return sum == 0 ? 0 : (factor == 0 ? smallest : factor);
}

/// The log-sum-exp of a row whose maximum is max * scale, from the sum relative to it. It does not go by way of powers
/// of two: two products with constants would each round it by 2^-24 of its size. max * scale is rounded in the same way
/// as backward rounds scores, so a key that outweighs all others has the probability 1 there.
__device__ __forceinline__ float exact_lse(float max, float scale, float sum, float sink) {
  if (sum == 0) return sink;
  const float scaled = ptx::multiply(max, scale);
  if (sink <= scaled) return scaled + log(sum + exp(sink - scaled));
  return sink + log(ptx::fma(sum, exp(scaled - sink), 1));
}

/// The log-sum-exp with a sink added. A NaN stays NaN.
__device__ __forceinline__ float lse_with_sink(float lse, float sink) {
  if (lse != lse) return lse;  // the comparison below would drop a NaN
  // The larger of the two logarithms is factored out, so that neither exponential can overflow.
  const float larger = ptx::max(lse, sink), difference = ptx::min(lse, sink) - larger;
  return larger == -infinity ? larger : larger + ptx::log2(1.0f + ptx::exp2(difference * log2_e)) * ln_2;
}

/// The moment plus p x, where p = 2^x. A hidden score has x = -inf, and p = 0.
template <bool may_be_hidden = true>
__device__ __forceinline__ float add_moment(float moment, float p, float x) {
  return ptx::fma(p, may_be_hidden ? ptx::max(x, -256.0f) : x, moment);
}

/// Statistics of two rows beside maximum and sum, for calls that need them.
template <bool has_largest, bool has_moment>
struct RowStatistics {
  static constexpr bool tracks_largest = has_largest, tracks_moment = has_moment;
  float largest[2] = {-infinity, -infinity};  // score, in the units of the scores
  float moment[2] = {0, 0};  // this lane's sum of p x, where p = 2^x is relative to the row's maximum or reference

  /// The maximum rises by `step` powers of two (-inf: there was none). `sum` and the moment were relative to the old
  /// maximum.
  __device__ __forceinline__ void raise(int row, float step, float sum, float rescale) {
    if constexpr (has_moment) moment[row] = (moment[row] - (step < infinity ? sum * step : 0)) * rescale;
  }
};

/// For calls that need none: does nothing.
template <>
struct RowStatistics<false, false> {
  static constexpr bool tracks_largest = false, tracks_moment = false;
};

/// The entropy of a row from its reference, sum and moment in powers of two; the sink is -inf if there is none.
__device__ __forceinline__ float row_entropy(float reference, float sum, float moment, float sink) {
  if (sum == 0) return 0;
  const float sink_log2 = sink * log2_e;
  const float new_reference = ptx::max(reference, sink_log2);
  const float rescale = ptx::exp2(reference - new_reference);
  const float total = ptx::fma(sum, rescale, ptx::exp2(sink_log2 - new_reference));
  const float above = new_reference - reference + ptx::log2(total);  // lse minus the reference
  return rescale / total * (sum * above - moment) * ln_2;
}

/// Beyond this limit, in powers of two, the rounding error of a row's maximum would be visible next to that of 16-bit
/// probabilities.
constexpr float large_reference = 4096.0f;

/// The largest scores of the two rows of a lane's group.
template <int blocks>
__device__ __forceinline__ void row_maxima(const float (&S)[blocks][4], float (&largest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = -infinity;
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      largest[half] = ptx::max(largest[half], ptx::max(S[n][2 * half], S[n][2 * half + 1]));
    }
    largest[half] = reduce_quad(largest[half], [](float a, float b) { return ptx::max(a, b); });
  }
}

/// The running maximum and sum of two rows. The maximum is in the units of the scores, the sum is this lane's part.
struct RowState {
  float max[2] = {-infinity, -infinity};
  float sum[2] = {0, 0};

  /// S becomes 2^log2_P_scale exp(scale * (S - new maximum)), 0 if S is -inf. `rescale` is the factor of earlier sums
  /// and outputs. It is 1 if the maximum stays, so a tile in which a row sees nothing changes no bit of the row.
  /// scale_log2 = scale * log2(e) > 0. A large maximum is subtracted before the product with the scale, because the
  /// rounding error of that product would be an error of the exponent. With `exact` every maximum is; otherwise a vote
  /// of the warp decides. `slack`: a maximum that rises by no more powers of two is kept, so P may be up to 2^slack.
  template <int log2_P_scale = 0, bool exact = false, int slack = 0, int blocks>
  __device__ __forceinline__ void update(float (&S)[blocks][4], float scale_log2, float (&rescale)[2]) {
    RowStatistics<false, false> none;
    update<log2_P_scale, exact, slack>(S, {scale_log2, scale_log2}, rescale, none);
  }
  /// The same with a scale for each row.
  template <int log2_P_scale = 0, bool exact = false, int blocks>
  __device__ __forceinline__ void update(float (&S)[blocks][4], const float (&scale_log2)[2], float (&rescale)[2]) {
    RowStatistics<false, false> none;
    update<log2_P_scale, exact>(S, scale_log2, rescale, none);
  }
  /// The same with the moments of the rows.
  template <int log2_P_scale = 0, bool exact = false, int slack = 0, int blocks, class Statistics>
  __device__ __forceinline__ void update(float (&S)[blocks][4], const float (&scale_log2)[2], float (&rescale)[2],
                                         Statistics& statistics) {
    float raised[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raised[half] = max[half];
#pragma unroll
      for (int n = 0; n < blocks; ++n) raised[half] = ptx::max(raised[half], ptx::max(S[n][2 * half], S[n][2 * half + 1]));
      raised[half] = reduce_quad(raised[half], [](float a, float b) { return ptx::max(a, b); });
    }
    update_to<log2_P_scale, exact, slack>(S, raised, scale_log2, rescale, statistics);
  }
  /// The same with the largest scores of S known (row_maxima), before the running maximum was.
  template <int log2_P_scale = 0, bool exact = false, int blocks>
  __device__ __forceinline__ void raise_and_update(float (&S)[blocks][4], const float (&largest)[2],
                                                   const float (&scale_log2)[2], float (&rescale)[2]) {
    const float raised[2] = {ptx::max(max[0], largest[0]), ptx::max(max[1], largest[1])};
    RowStatistics<false, false> none;
    update_to<log2_P_scale, exact, 0>(S, raised, scale_log2, rescale, none);
  }

 private:
  template <int log2_P_scale, bool exact, int slack, int blocks, class Statistics>
  __device__ __forceinline__ void update_to(float (&S)[blocks][4], const float (&raised)[2], const float (&scale_log2)[2],
                                            float (&rescale)[2], Statistics& statistics) {
    float origin[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = raised[half];
      if constexpr (slack > 0) new_max = (new_max - max[half]) * scale_log2[half] > slack ? new_max : max[half];
      // For a row that has seen nothing the arithmetic stays finite: exp2(-inf - 0) = 0.
      origin[half] = new_max == -infinity ? 0 : new_max;
      rescale[half] = ptx::exp2((max[half] - origin[half]) * scale_log2[half]);
      if constexpr (Statistics::tracks_moment)
        statistics.raise(half, (origin[half] - max[half]) * scale_log2[half], sum[half], rescale[half]);
      max[half] = new_max;
    }
    float reference[2] = {origin[0] * scale_log2[0], origin[1] * scale_log2[1]};
    if (exact || ptx::any(ptx::max(ptx::abs(reference[0]), ptx::abs(reference[1])) > large_reference)) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[n][e] -= origin[e / 2];
      }
      reference[0] = reference[1] = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shifted = reference[half] - log2_P_scale;
      float total = 0;
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float x = ptx::fma(S[n][e], scale_log2[half], -shifted);
          S[n][e] = ptx::exp2(x);
          total += S[n][e];
          if constexpr (Statistics::tracks_moment)
            statistics.moment[half] = add_moment(statistics.moment[half], S[n][e], x);
        }
      }
      sum[half] = ptx::fma(sum[half], rescale[half], total);
    }
  }

 public:
  __device__ __forceinline__ float total(int half) const {
    return reduce_quad(sum[half], [](float a, float b) { return a + b; });
  }

  /// finish_row() for row `half`.
  template <int log2_P_scale = 0>
  __device__ __forceinline__ float finish(int half, float scale_log2, float sink, float& lse) const {
    const float row_total = total(half);
    const float scaled_max = max[half] == -infinity ? -infinity : max[half] * scale_log2 - log2_P_scale;
    return finish_row(scaled_max, row_total, sink, lse);
  }
};

}  // namespace flash_attention::tile
