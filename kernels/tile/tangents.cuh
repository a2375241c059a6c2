#pragma once

#include "tile/score.cuh"

// Scores and their tangents, which forward mode and second derivatives share. docs/numerics.md has the formulas; a dot
// after a name means its tangent:
//
//     S. = slope of the program * (slope of the soft cap * scale (Q. K^T + Q K.^T) + bias.)

namespace flash_attention::tile {

/// A view of a tangent, which has the layout of its tensor.
__device__ __forceinline__ TensorView tangent_view(const TensorView& of, void* data) {
  TensorView view = of;
  view.data = data;
  return view;
}

/// A score before the softmax, its tangent, and the soft cap's derivatives for second derivatives.
struct ScoreTangent {
  float score;
  float tangent;
  float raw;        // the tangent of scale * dot
  float of_cap;     // the soft cap's derivative
  float curvature;  // and its second one
};

/// The tangents of one sequence and head. One that was not given is 0, and its rows are never read.
template <Features features>
struct Tangents {
  using Element = const ptx::Element<features.dtype>;
  using Bias = ptx::Element<features.bias_dtype>;

  Rows<Element> Q, K, V;
  bool has_Q, has_K, has_V;
  const Bias* bias;
  long long bias_stride;

  __device__ __forceinline__ Tangents(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : Q(query_rows<Element, features>(tangent_view(args.Q, args.Q_tangent), sequence, head_idx)),
        K(key_rows<Element, features>(tangent_view(args.K, args.K_tangent), sequence, head_idx / args.group)),
        V(key_rows<Element, features>(tangent_view(args.V, args.V_tangent), sequence, head_idx / args.group)),
        has_Q(args.Q_tangent != nullptr),
        has_K(args.K_tangent != nullptr),
        has_V(args.V_tangent != nullptr),
        bias(nullptr) {
    Q.count = sequence.len_q;
    K.count = V.count = sequence.visible_kv;
    if constexpr (features.bias) {
      if (args.bias_tangent == nullptr) return;
      bias = static_cast<const Bias*>(args.bias_tangent) + sequence.batch_idx * args.bias.batch_stride +
             head_idx * args.bias.head_stride;
      bias_stride = args.bias.q_stride;
    }
  }

  /// From the dot product and its tangent. Only for i and j inside the sequence. A score of -inf has the tangent 0.
  __device__ __forceinline__ ScoreTangent of(const Score<features>& score, float dot, float dot_tangent, int i,
                                             int j) const {
    ScoreTangent result;
    float slope = 1;
    const float capped = score.capped(dot, result.of_cap);
    result.score = score.programmed(capped + score.added(i, j), i, j, slope);
    result.raw = score.scale * dot_tangent;
    result.curvature = 0;
    if constexpr (features.softcap) result.curvature = -2 * capped / (score.softcap * score.softcap) * result.of_cap;
    result.tangent = result.of_cap * result.raw;
    if constexpr (features.bias) {
      if (bias != nullptr) result.tangent += ptx::to_float(bias[i * bias_stride + j]);
    }
    if constexpr (features.score_program) result.tangent *= slope;
    if (result.score == -infinity) result.tangent = 0;
    return result;
  }
};

}  // namespace flash_attention::tile
