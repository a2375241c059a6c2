#pragma once

#include "tile/element.cuh"
#include "tile/math.cuh"
#include "tile/program.cuh"
#include "tile/scales.cuh"
#include "tile/visibility.cuh"

// From the dot product of a query and a key to the score: docs/numerics.md in code. tile/visibility.cuh says which
// scores exist. A feature that is off compiles to nothing.

namespace flash_attention::tile {

// Bounds of scores, which keep the results of softmax finite.

/// The largest score. It stays finite when softmax multiplies it by log2 e.
constexpr float largest_score = 2.3e38f;

/// A bias as it is added. Finite biases stay finite.
template <Type type>
__device__ __forceinline__ float bounded_bias(ptx::Element<type> value) {
  constexpr float largest = largest_score;
  const float bias = ptx::to_float(value);
  if constexpr (type == Type::float16) return bias;
  const float magnitude = ptx::abs(bias);
  return magnitude > largest && magnitude < infinity ? (bias < 0 ? -largest : largest) : bias;
}

/// Backward computes probabilities from lse. Only a bias can make lse lower than this limit; a float then has no room
/// for the sum next to the maximum, so such a row counts as one without keys.
constexpr float lowest_lse = -1e7f;

/// The scores of one sequence and head.
template <Features features>
struct Score {
  static constexpr bool linear = !features.modifies_scores();
  using Bias = ptx::Element<features.bias_dtype>;
  using ProgramRow = typename Program<features.score_program>::Row;
  using ProgramKey = typename Program<features.score_program>::Key;

  [[no_unique_address]] Visibility<features> sight;  // which keys a query sees; `scale` may use its padding
  float scale;
  float softcap;
  float slope;
  const Bias* bias;
  long long bias_stride;
  Program<features.score_program> program;

  __device__ __forceinline__ Score(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : sight(args, sequence, head_idx), scale(args.scale), program(args, sequence.batch_idx, head_idx) {
    if constexpr (features.kv_scales && !features.latent)  // latent keys have two scales each
      scale *= head_scale<features>(args.K_scale, sequence.batch_idx, head_idx / args.group);
    if constexpr (features.q_scales) scale *= scale_of_head(args.Q_scale, sequence.batch_idx, head_idx / args.group);
    if constexpr (features.softcap) softcap = args.softcap;
    if constexpr (features.alibi) slope = args.alibi_slopes[sequence.batch_idx * args.alibi_batch_stride + head_idx];
    if constexpr (features.bias) {
      bias = static_cast<const Bias*>(args.bias.data) + sequence.batch_idx * args.bias.batch_stride +
             head_idx * args.bias.head_stride;
      bias_stride = args.bias.q_stride;
    }
  }

  /// scale * dot, soft-capped.
  __device__ __forceinline__ float capped(float dot) const {
    if constexpr (features.softcap) return softcap * tanh(dot * scale / softcap);
    return dot * scale;
  }

  /// The same; slope is d capped / d (scale * dot).
  __device__ __forceinline__ float capped(float dot, float& slope) const {
    slope = 1;
    if constexpr (features.softcap) return softcap * tanh(dot * scale / softcap, slope);
    return dot * scale;
  }

  /// The sum of bias and ALiBi for a score. Only for i and j inside of the sequence.
  __device__ __forceinline__ float added(int i, int j) const {
    float result = 0;
    if constexpr (features.bias) result = bounded_bias<features.bias_dtype>(bias[i * bias_stride + j]);
    if constexpr (features.alibi) {
      const int distance = i + sight.len_kv - sight.len_q - j;
      result -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return result;
  }

  /// The program's result for a score. Only for i and j inside of the sequence.
  __device__ __forceinline__ float programmed(float score, int i, int j) const {
    return programmed(score, program.row(i), program.key(j));
  }
  __device__ __forceinline__ float programmed(float score, const ProgramRow& row, const ProgramKey& key) const {
    if constexpr (features.score_program) return bounded(program.score(score, row, key));
    return score;
  }
  /// The same; multiplies slope by the derivative. minus_lse: the bounded lse is subtracted, so a score far below it
  /// becomes a probability of 0, whether it is bounded or not.
  template <bool minus_lse = false>
  __device__ __forceinline__ float programmed(float score, int i, int j, float& slope) const {
    if constexpr (!features.score_program) return score;
    if constexpr (features.score_program) score = program.score(score, program.row(i), program.key(j), slope);
    return minus_lse && may_be_huge ? ptx::min_or_nan(score, largest_score) : bounded(score);
  }
  static constexpr bool may_be_huge = features.score_program && Program<features.score_program>::largest > largest_score;
  __device__ __forceinline__ static float bounded(float score) {
    return may_be_huge ? bounded_bias<Type::float32>(score) : score;
  }
  /// The score of a dot product.
  __device__ __forceinline__ float full(float dot, int i, int j) const {
    return programmed(capped(dot) + added(i, j), i, j);
  }

  /// The score in units of unit_scale(). If the score is linear in the dot product, that is the dot product itself.
  __device__ __forceinline__ float in_units(float dot, int i, int j) const {
    if constexpr (linear) return dot;
    return full(dot, i, j);
  }
  __device__ __forceinline__ float unit_scale() const { return linear ? scale : 1.0f; }
};

}  // namespace flash_attention::tile
