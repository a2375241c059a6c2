#pragma once

// Softmax of a tile of scores in registers, and its probabilities as the 8-bit operand of P V.

#include "forward/sm90_fp8/shape.cuh"
#include "ptx/pairs.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90_fp8 {

// A probability is stored as 2^(top + s - reference). The reference is a score of the row. It is raised if a probability
// exceeds `limit`, the largest number of e4m3, that is if a score exceeds the reference by more than `slack`. Probabilities
// of at least 2^-12 of the reference's keep all bits of e4m3; those below 2^-16 become 0. The reference's own probability
// is a power of 2 and is not rounded, so if one key dominates a row, the output is that key's value.
constexpr float top = 6.0f, slack = 2.8073549f;  // log2(limit) - top
constexpr float limit = 448.0f;

using tile::RowState;  // its maximum is the reference

template <ForwardConfig config>
struct Softmax {
  using Math = ScoreMath<config>;
  using ScoreTile = typename Math::Tile;
  using PackedTile = unsigned[config.block_kv / 32][4];

  /// Raises the references that must be raised. Returns whether any row of the warp was; then older sums must be multiplied
  /// by `rescale`.
  __device__ __forceinline__ static bool raise(const Math& math, const ScoreTile& S, RowState& rows, float (&rescale)[2]) {
    float largest[2];
    bool exceeded = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = S[2 * r], odd = S[2 * r + 1];  // two chains of comparisons
#pragma unroll
      for (int i = 4 + 2 * r; i < Math::count; i += 4) {
        even = ptx::max(even, S[i]);
        odd = ptx::max(odd, S[i + 1]);
      }
      largest[r] = ptx::max(even, odd);
      largest[r] = ptx::max(largest[r], ptx::shuffle_xor(largest[r], 1));
      largest[r] = ptx::max(largest[r], ptx::shuffle_xor(largest[r], 2));
      exceeded = exceeded ||
                 (largest[r] - rows.max[r]) * math.exponent_scale > slack;  // inf - inf is NaN: false, nothing to raise
      rescale[r] = 1;
    }
    if (!ptx::any(exceeded)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float raised = ptx::max(rows.max[r], largest[r]);
      rescale[r] = ptx::exp2((rows.max[r] - Math::finite(raised)) * math.exponent_scale);
      rows.max[r] = raised;
      rows.sum[r] *= rescale[r];
    }
    return true;
  }

  /// Whether a row of this thread has no reference yet, or one so large that the rounding error of its product with the
  /// scale would change exponents and absorb `top`.
  __device__ __forceinline__ static bool is_large_or_none(const Math& math, const RowState& rows) {
    return ptx::max(ptx::abs(rows.max[0]), ptx::abs(rows.max[1])) * math.exponent_scale > tile::large_reference;
  }
  __device__ __forceinline__ static bool is_large(const Math& math, const RowState& rows) {
    return is_large_or_none(math, {.max = {Math::finite(rows.max[0]), Math::finite(rows.max[1])}});
  }

  /// Subtracts the references from the scores; exponentiate() does the rest.
  __device__ __forceinline__ static void subtract_max(const RowState& rows, ScoreTile& S) {
#pragma unroll
    for (int i = 0; i < Math::count; ++i) S[i] -= Math::finite(rows.max[i / 2 % 2]);
  }

  /// This thread's part of the row sums of a block, in four independent chains of additions.
  struct Sums {
    float of[2][4];

    /// No probability is larger than a sum that contains it. For most blocks this test alone shows that no reference must
    /// be raised, without comparing each score.
    __device__ __forceinline__ bool exceed_limit() const {
      float largest = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest = ptx::max_or_nan(
            largest, ptx::max_or_nan(ptx::max_or_nan(of[r][0], of[r][1]), ptx::max_or_nan(of[r][2], of[r][3])));
      }
      return !(largest <= limit);
    }
    __device__ __forceinline__ void add_to(RowState& rows) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows.sum[r] += (of[r][0] + of[r][1]) + (of[r][2] + of[r][3]);
    }
  };

  /// P = 2^(top + s - reference) as the A operand of P V, 32 keys at a time, so that conversions alternate with
  /// exponentials, which take longest. The scores are kept, in case a reference turns out to be too low. max_subtracted:
  /// the scores no longer contain the reference.
  __device__ __forceinline__ static Sums exponentiate(const Math& math, const ScoreTile& S, const RowState& rows,
                                                      PackedTile& P, bool max_subtracted = false) {
    Sums sums{};
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = max_subtracted ? top : top - Math::finite(rows.max[r]) * math.exponent_scale;
    }
#pragma unroll
    for (int step = 0; step < config.block_kv / 32; ++step) {
      float p[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = i / 2 % 2;
        p[i] = ptx::exp2(ptx::fma(S[16 * step + i], math.exponent_scale, shift[r]));
        sums.of[r][i / 4 % 2 * 2 + i % 2] += p[i];
      }
      pack(p, P[step]);
    }
    return sums;
  }

  /// A thread holds keys 2u, 2u + 1, 2u + 8 and 2u + 9 of each 16, but the operand needs four neighbours. They are used as
  /// neighbours, and V^T has its keys in the same order (transpose.cuh). So nothing moves between threads.
  __device__ __forceinline__ static void pack(const float (&p)[16], unsigned (&packed)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* from = p + 8 * (i / 2) + 2 * (i % 2);
      packed[i] = ptx::to_e4m3_pair(from[0], from[1]) | static_cast<unsigned>(ptx::to_e4m3_pair(from[4], from[5])) << 16;
    }
  }
};

}  // namespace flash_attention::forward_sm90_fp8
