#pragma once

// Softmax of a tile of scores in registers, and its probabilities as the 8-bit operand of P V.

#include "forward/sm90_fp8/shape.cuh"
#include "ptx/pairs.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90_fp8 {

// A probability is 2^(top + s - reference). The reference is a score of the row; it is raised where a score passes it by
// more than `slack`, so that the largest probability is at most 2^8, and e4m3 goes to 448. What is 2^-12 of the reference
// or more keeps all bits of e4m3, what is below 2^-16 is 0. The reference itself, a whole power of 2, is not rounded: a row
// that is nearly one key is that key.
constexpr float top = 6.0f, slack = 2.0f;

using tile::RowState;  // its maximum is the reference

template <ForwardConfig config>
struct Softmax {
  using Math = ScoreMath<config>;
  using ScoreTile = typename Math::Tile;
  using PackedTile = unsigned[config.block_kv / 32][4];

  /// Raises the reference where it must be; whether it was, for any row of the warp. Older sums are then to be multiplied
  /// by `correction`.
  __device__ __forceinline__ static bool raise(const Math& math, const ScoreTile& S, RowState& rows,
                                               float (&correction)[2]) {
    float largest[2];
    bool passed = false;
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
      passed = passed || (largest[r] - rows.max[r]) * math.exponent_scale > slack;  // inf - inf: nothing to raise
      correction[r] = 1;
    }
    if (!ptx::any(passed)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float raised = ptx::max(rows.max[r], largest[r]);
      correction[r] = ptx::exp2((rows.max[r] - Math::finite(raised)) * math.exponent_scale);
      rows.max[r] = raised;
      rows.sum[r] *= correction[r];
    }
    return true;
  }

  /// S becomes 2^(top + s - reference); this thread's part of the row sums grows by it.
  __device__ __forceinline__ static void exponentiate(const Math& math, ScoreTile& S, RowState& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = top - Math::finite(rows.max[r]) * math.exponent_scale;
      float even = 0, odd = 0;  // two chains of additions
#pragma unroll
      for (int i = 2 * r; i < Math::count; i += 4) {
        S[i] = ptx::exp2(ptx::fma(S[i], math.exponent_scale, shift));
        S[i + 1] = ptx::exp2(ptx::fma(S[i + 1], math.exponent_scale, shift));
        even += S[i];
        odd += S[i + 1];
      }
      rows.sum[r] += even + odd;
    }
  }

  /// P as the A operand of P V. A thread has keys 2u, 2u + 1, 2u + 8 and 2u + 9 of each 16; the operand wants four
  /// neighbours. So they change places with them, and V^T has its keys in the same order (transpose.cuh): nothing moves
  /// between threads.
  __device__ __forceinline__ static void pack(const ScoreTile& S, PackedTile& P) {
#pragma unroll
    for (int step = 0; step < config.block_kv / 32; ++step) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float* s = S + 16 * step + 8 * (p / 2) + 2 * (p % 2);
        P[step][p] = ptx::to_e4m3_pair(s[0], s[1]) | static_cast<unsigned>(ptx::to_e4m3_pair(s[4], s[5])) << 16;
      }
    }
  }
};

}  // namespace flash_attention::forward_sm90_fp8
