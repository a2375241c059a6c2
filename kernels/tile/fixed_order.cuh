#pragma once

#include "ptx/math.cuh"
#include "tile/math.cuh"

// The arithmetic of invariant bits: docs/numerics.md, "Invariant bits", line by line. decode/ and forward/sm90 compute a
// row with these functions, so that prefill and decoding have the same bits. The compiler may turn a product and a sum of
// C++ into one instruction in one kernel and not in another: where both follow each other, ptx::fma says which.

namespace flash_attention::tile {

/// A row that has seen no key has the maximum -inf. Any finite reference will do.
__device__ __forceinline__ float finite_reference(float maximum) { return maximum == -infinity ? 0.0f : maximum; }

/// What older sums of a row are multiplied by when its maximum is raised. 1 where it stays.
__device__ __forceinline__ float factor_of_raise(float maximum, float raised, float scale_log2) {
  return ptx::exp2((maximum - finite_reference(raised)) * scale_log2);
}

/// p = exp2(fma(s - origin, scale_log2, -shift)). The rounding error of a large maximum's product with the scale would be
/// an exponent: it is taken off before. Which of the two depends on the row alone.
struct ExponentOrigin {
  float origin = 0;
  float shift = 0;

  __device__ __forceinline__ ExponentOrigin(float maximum, float scale_log2) {
    constexpr float large = 4096.0f;
    const float reference = finite_reference(maximum), scaled = reference * scale_log2;
    const bool is_large = !(ptx::abs(scaled) <= large);
    origin = is_large ? reference : 0.0f;
    shift = is_large ? 0.0f : scaled;
  }
};

/// This thread's part of the sum of 16 keys: two neighbours, and the two that are 8 keys on.
__device__ __forceinline__ float sum_of_four(float a, float b, float c, float d) { return (a + b) + (c + d); }

/// Maximum and sum of a row over the segments so far. The maximum is in the units of the scores.
struct RowTotal {
  float max = -infinity;
  float sum = 0;

  /// Factors of the sums so far and of the next segment's.
  struct Factors {
    float before;
    float segment;
  };
  /// Adds a segment. One in which the row sees no key changes no bit; the first one is taken over as it is.
  __device__ __forceinline__ Factors add(float segment_max, float segment_sum, float scale_log2) {
    const float raised = ptx::max(max, segment_max);
    const Factors factors{factor_of_raise(max, raised, scale_log2), factor_of_raise(segment_max, raised, scale_log2)};
    sum = combine(sum, segment_sum, factors);
    max = raised;
    return factors;
  }
  __device__ __forceinline__ static float combine(float before, float segment, const Factors& factors) {
    return ptx::fma(segment, factors.segment, before * factors.before);
  }
};

/// What a row's output is multiplied by, 0 for a row without keys, and its log-sum-exp. The sink is -inf if there is none.
__device__ __forceinline__ float finish_total(float max, float sum, float scale_log2, float sink, float& lse) {
  const float max_log2 = max == -infinity ? -infinity : ptx::fma(max, scale_log2, 0.0f);
  const float sink_log2 = ptx::fma(sink, log2_e, 0.0f);
  const float new_max = ptx::max(max_log2, sink_log2);
  const float reference = finite_reference(new_max);
  const float rescale = ptx::exp2(max_log2 - reference);
  const float total = ptx::fma(sum, rescale, ptx::exp2(sink_log2 - reference));
  lse = total == 0 ? -infinity : (new_max + ptx::log2(total)) * ln_2;
  // A sink may leave nothing of a row that has keys. It is not a row without keys: a NaN among its values shows.
  const float factor = rescale / total;
  return sum == 0 ? 0 : (factor == 0 ? smallest : factor);
}

/// scale * dot, soft-capped, and what bias and ALiBi add to it. tanh takes two instructions of the special function unit:
/// tanh(x) = 1 - 2 / (1 + e^2x), with an error of 3e-7. Near 0 the lse may be no larger than that error times the cap, so
/// there a polynomial is used; not for the scores of `interior` blocks of forward/sm90.
template <bool has_softcap, bool interior = false>
__device__ __forceinline__ float capped_score(float dot, float scale, float softcap, float added) {
  if constexpr (has_softcap) {
    const float x = dot * (scale / softcap), square = x * x;
    const float exponential = ptx::exp2(interior ? dot * (2.0f * log2_e * scale / softcap) : x * (2.0f * log2_e));
    float tanh = ptx::fma(-2.0f, ptx::reciprocal(1.0f + exponential), 1.0f);
    if (!interior && square < 0.01f) tanh = x * ptx::fma(square, ptx::fma(square, 2.0f / 15, -1.0f / 3), 1.0f);
    return ptx::fma(softcap, tanh, added);
  }
  return ptx::fma(dot, scale, added);
}

}  // namespace flash_attention::tile
