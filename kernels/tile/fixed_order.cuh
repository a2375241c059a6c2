#pragma once

#include "abi/config.h"
#include "ptx/math.cuh"
#include "tile/math.cuh"

// The arithmetic of invariant bits, line by line as in docs/numerics.md, "Invariant bits". decode/ and forward/sm90
// compute a row with these functions, so that prefill and decoding have the same bits. The compiler may fuse a product
// and a sum of C++ in one kernel and not in another: so wherever a sum follows a product, ptx::fma or ptx::multiply
// says which is meant.

namespace flash_attention::tile {

using abi::Type;

/// A row that has seen no key has the maximum -inf. Any finite reference will do.
__device__ __forceinline__ float finite_reference(float maximum) { return maximum == -infinity ? 0.0f : maximum; }

/// The factor of a row's older sums when its maximum is raised; 1 if it stays.
__device__ __forceinline__ float factor_of_raise(float maximum, float raised, float scale_log2) {
  return ptx::exp2((maximum - finite_reference(raised)) * scale_log2);
}

/// p = exp2(fma(s - origin, scale_log2, -shift)). For a large maximum, the rounding error of its product with the scale
/// would be an error of the exponent, so the maximum is subtracted before (origin). Which of the two is used depends
/// only on the row.
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

/// A row's reference stays until the sum of its segment would exceed this: the largest P of float16, or 2^40.
template <Type type>
constexpr float largest_sum = type == Type::float16 ? 65504.0f : 1099511627776.0f;

/// Whether a block may raise the reference, from the largest probability of its (at most 128) keys and one of the four
/// parts of the sum before. If not, the sum stays below the limit: 4 / 16 + 128 / 256 of it.
template <Type type>
__device__ __forceinline__ bool may_exceed(float largest_p, float part) {
  return !(largest_p <= largest_sum<type> / 256 && part <= largest_sum<type> / 16);
}

/// This thread's part of the sum of 16 keys: two neighbours, and the two neighbours 8 keys later.
__device__ __forceinline__ float sum_of_four(float a, float b, float c, float d) { return (a + b) + (c + d); }

/// Maximum and sum of a row over the segments so far. The maximum is in the units of the scores.
struct RowTotal {
  float max = -infinity;
  float sum = 0;

  /// The factors of the sums so far and of the next segment's sums.
  struct Factors {
    float before;
    float segment;
  };
  /// Adds a segment. If the row sees no key in it, no bit changes. The first segment is copied.
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

/// Computes the factor of a row's output, 0 for a row without keys, and the row's log-sum-exp. The sink is -inf if
/// there is none.
__device__ __forceinline__ float finish_total(float max, float sum, float scale_log2, float sink, float& lse) {
  const float max_log2 = max == -infinity ? -infinity : ptx::fma(max, scale_log2, 0.0f);
  const float sink_log2 = ptx::fma(sink, log2_e, 0.0f);
  const float new_max = ptx::max(max_log2, sink_log2);
  const float reference = finite_reference(new_max);
  const float rescale = ptx::exp2(max_log2 - reference);
  const float total = ptx::fma(sum, rescale, ptx::exp2(sink_log2 - reference));
  lse = total == 0 ? -infinity : (new_max + ptx::log2(total)) * ln_2;
  // A sink may be so large that the row's factor is 0. The row still has keys, so a NaN among its values must show.
  const float factor = rescale / total;
  return sum == 0 ? 0 : (factor == 0 ? smallest : factor);
}

/// scale * dot, soft-capped, plus `added` (bias and ALiBi). tanh takes two instructions of the special function unit:
/// tanh(x) = 1 - 2 / (1 + e^2x), with an error of 3e-7. Near 0 lse may be as small as that error times the cap, so a
/// polynomial is used there; `interior` blocks of forward/sm90 do without it.
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

/// The same in the fixed order, in which tanh(x) of a small x is a polynomial, of FMAs only. Which of the two is used
/// depends on this score alone; a kernel may leave out the one that none of its scores needs.
struct OrderedCap {
  float to_x, cap;
  float factors[4];  // of the powers of dot^2, times dot

  __device__ __forceinline__ OrderedCap(float scale, float softcap) : to_x(scale / softcap), cap(softcap) {
    constexpr float p[4] = {0.99999946f, -0.33326318f, 0.13190297f, -0.04440222f};  // to 6e-7 of tanh(x)
    float power = scale;
#pragma unroll
    for (int t = 0; t < 4; ++t, power = ptx::multiply(power, ptx::multiply(to_x, to_x)))
      factors[t] = ptx::multiply(p[t], power);
  }
  __device__ __forceinline__ bool is_small(float dot) const { return ptx::abs(ptx::multiply(dot, to_x)) <= 0.5f; }
  __device__ __forceinline__ float of_small(float dot, float added) const {
    const float square = ptx::multiply(dot, dot);
    float slope = ptx::fma(factors[3], square, factors[2]);
    slope = ptx::fma(slope, square, factors[1]);
    slope = ptx::fma(slope, square, factors[0]);
    return ptx::fma(dot, slope, added);
  }
  __device__ __forceinline__ float of_any(float dot, float added) const {
    const float exponential = ptx::exp2(ptx::multiply(dot, ptx::multiply(to_x, 2.0f * log2_e)));
    const float tanh = ptx::fma(-2.0f, ptx::reciprocal(1.0f + exponential), 1.0f);
    return is_small(dot) ? of_small(dot, added) : ptx::fma(cap, tanh, added);
  }
};

/// The score of the fixed order.
template <bool has_softcap>
__device__ __forceinline__ float ordered_score(float dot, float scale, float softcap, float added) {
  if constexpr (has_softcap) return OrderedCap(scale, softcap).of_any(dot, added);
  return ptx::fma(dot, scale, added);
}

}  // namespace flash_attention::tile
