#pragma once

// Softmax of a tile of scores in registers, and its probabilities as the 8-bit operand of P V.

#include "forward/sm90_fp8/shape.cuh"
#include "ptx/pairs.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90_fp8 {

// A probability is 2^(top + s - reference). The reference is a score of the row; it is raised where a probability passes
// `limit`, the largest number of e4m3, that is where a score passes the reference by more than `slack`. What is 2^-12 of
// the reference or more keeps all bits of e4m3, what is below 2^-16 is 0. The reference itself, a whole power of 2, is not
// rounded: a row that is nearly one key is that key.
constexpr float top = 6.0f, slack = 2.8073549f;  // log2(limit) - top
constexpr float limit = 448.0f;

using tile::RowState;  // its maximum is the reference

template <ForwardConfig config>
struct Softmax {
  using Math = ScoreMath<config>;
  using ScoreTile = typename Math::Tile;
  using PackedTile = unsigned[config.block_kv / 32][4];

  /// Raises the reference where it must be; whether it was, for any row of the warp. Older sums are then to be multiplied
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
      exceeded = exceeded || (largest[r] - rows.max[r]) * math.exponent_scale > slack;  // inf - inf: nothing to raise
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

  /// Whether the reference of a row of this thread is so large that the rounding error of its product with the scale would
  /// be an exponent, and `top` be lost in it; or there is none yet.
  __device__ __forceinline__ static bool is_large_or_none(const Math& math, const RowState& rows) {
    return ptx::max(ptx::abs(rows.max[0]), ptx::abs(rows.max[1])) * math.exponent_scale > tile::large_reference;
  }
  __device__ __forceinline__ static bool is_large(const Math& math, const RowState& rows) {
    return is_large_or_none(math, {.max = {Math::finite(rows.max[0]), Math::finite(rows.max[1])}});
  }

  /// Takes the references off the scores; exponentiate() does the rest.
  __device__ __forceinline__ static void subtract_max(const RowState& rows, ScoreTile& S) {
#pragma unroll
    for (int i = 0; i < Math::count; ++i) S[i] -= Math::finite(rows.max[i / 2 % 2]);
  }

  /// This thread's part of the row sums of a block, in four chains.
  struct Sums {
    float of[2][4];

    /// No probability is larger than a sum of which it is a part: most blocks are seen by that to have raised nothing,
    /// without a comparison for each score.
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

  /// P = 2^(top + s - reference) as the A operand of P V, 32 keys at a time: the conversions are then between the
  /// exponentials, which take longest. The scores stay, for a reference that turns out to be too low. With `max_subtracted`
  /// they have lost it already.
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

  /// A thread has keys 2u, 2u + 1, 2u + 8 and 2u + 9 of each 16; the operand wants four neighbours. So they change places
  /// with them, and V^T has its keys in the same order (transpose.cuh): nothing moves between threads.
  __device__ __forceinline__ static void pack(const float (&p)[16], unsigned (&packed)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* from = p + 8 * (i / 2) + 2 * (i % 2);
      packed[i] = ptx::to_e4m3_pair(from[0], from[1]) | static_cast<unsigned>(ptx::to_e4m3_pair(from[4], from[5])) << 16;
    }
  }
};

}  // namespace flash_attention::forward_sm90_fp8
