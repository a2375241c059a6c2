#pragma once

// What happens to a tile of scores in registers between Q K^T and P V:
//
//     options and mask     modify, modify_and_mask           score_options.cuh
//     online maximum       raise_maximum                     edge blocks, and all blocks of a retry
//     P = 2^(S - max)      exponentiate, probability_of      and this thread's part of the row sums
//     dropout              drop
//     P in 16 bits         pack

#include "forward/sm90/score_options.cuh"
#include "ptx/path.cuh"
#include "tile/soft_cap.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90 {

/// From the scores of one thread to its part of P.
template <ForwardConfig config>
struct ScoreMath : ScoreOptions<config> {
  using Base = ScoreOptions<config>;
  using Base::Base, Base::features, Base::count, Base::score, Base::exponent_scale, Base::row, Base::column;
  using Base::row_of, Base::key_of, Base::added_to;
  using typename Base::Shape, typename Base::Added, typename Base::Tile, typename Base::Packed;

  /// Raises the running maximum of both rows by this block; `rescale` is what older sums must be multiplied by.
  __device__ __forceinline__ void raise_maximum(const Tile& S, float (&row_max)[2], float (&rescale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float block_max = S[2 * r];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) == r) block_max = ptx::max(block_max, S[i]);
      }
      block_max = ptx::max(block_max, ptx::shuffle_xor(block_max, 1));
      block_max = ptx::max(block_max, ptx::shuffle_xor(block_max, 2));
      const float raised = ptx::max(row_max[r], block_max);
      rescale[r] = ptx::exp2((row_max[r] - finite(raised)) * exponent_scale);
      row_max[r] = raised;
    }
  }

  static constexpr bool may_be_huge =
      features.bias || (features.score_program && tile::Program<features.score_program>::largest > 4096.0f);

  /// Whether a row's reference, in powers of 2, is so large that the rounding error of its product with the scale is an
  /// exponent. Edge blocks then take it off first; a tile whose other blocks did not is done again.
  __device__ __forceinline__ static bool is_large(float reference) {
    return !may_be_huge && ptx::abs(reference) > tile::large_reference;
  }

  /// exponentiate() with references of any size.
  __device__ __forceinline__ void exponentiate_any(Tile& S, const float (&row_max)[2], float (&row_sum)[2]) const {
    if constexpr (may_be_huge) return exponentiate(S, row_max, row_sum);
    const float scaled[2] = {finite(row_max[0]) * exponent_scale, finite(row_max[1]) * exponent_scale};
    if (!ptx::any(is_large(scaled[0]) || is_large(scaled[1]))) return exponentiate(S, row_max, row_sum);
#pragma unroll
    for (int i = 0; i < count; ++i) S[i] -= finite(row_max[row_of(i)]);
    exponentiate(S, {0, 0}, row_sum);
  }

  /// S becomes 2^(exponent_scale (S - row_max)); this thread's part of the row sums grows by it.
  __device__ __forceinline__ void exponentiate(Tile& S, const float (&row_max)[2], float (&row_sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = -finite(row_max[r]) * exponent_scale;
      float even = 0, odd = 0;  // two chains of additions
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) != r) continue;
        // The rounding error of a huge maximum's product would be an exponent.
        S[i] =
            ptx::exp2(may_be_huge ? (S[i] - finite(row_max[r])) * exponent_scale : ptx::fma(S[i], exponent_scale, shift));
        (i % 2 == 0 ? even : odd) += S[i];
      }
      row_sum[r] += even + odd;
    }
  }

  /// modify() and exponentiate(). Where no score of the warp is beyond a part of the soft cap, a polynomial takes the place
  /// of tanh, and its last step that of the exponent's.
  __device__ __forceinline__ void probability_of(Tile& S, int kv_begin, const float (&row_max)[2],
                                                 float (&row_sum)[2]) const {
    if constexpr (features.softcap && !features.score_program) {
      const float to_x = score.scale / score.softcap;
      const float largest = tile::largest_magnitude(S) * to_x;
      if (ptx::all(largest <= 0.25f)) {
        ptx::path<"forward/sm90 soft cap of three terms">();
        return exponentiate_capped(S, kv_begin, row_max, row_sum, to_x, {0.99999960f, -0.33321908f, 0.12841613f});
      }
      if (ptx::all(largest <= 0.5f)) {
        ptx::path<"forward/sm90 soft cap of four terms">();
        return exponentiate_capped(S, kv_begin, row_max, row_sum, to_x,
                                   {0.99999946f, -0.33326318f, 0.13190297f, -0.04440222f});
      }
      ptx::path<"forward/sm90 soft cap by exponential">();
    }
    if constexpr (Shape::bias_stages > 0) {
      // The rounding error of a huge maximum's product would be an exponent.
      const auto is_small = [](float maximum) { return ptx::abs(finite(maximum)) <= 4096.0f; };
      if (ptx::all(is_small(row_max[0]) && is_small(row_max[1]))) {
        return exponentiate_biased(S, row_max, row_sum);
      }
      this->read_biases();
    }
    if constexpr (features.alibi && !features.softcap && !features.bias && !features.score_program) {
      const int key = ptx::registers_fresh(row) / 16 * 16 + score.len_kv - score.len_q;  // of the warp's first diagonal
      if (Shape::from_diagonal || ptx::all(kv_begin + Base::block_kv <= key || kv_begin >= key + 16)) {
        ptx::path<"forward/sm90 ALiBi on one side of the diagonal">();
        return exponentiate_sloped(S, kv_begin, row_max, row_sum, kv_begin < key ? score.slope : -score.slope);
      }
    }
    this->template modify<true>(S, kv_begin);
    exponentiate(S, row_max, row_sum);
  }

  /// A bias by itself. What is too large for a float becomes 0 or Inf here, as it would where it is bounded first.
  __device__ __forceinline__ void exponentiate_biased(Tile& S, const float (&row_max)[2], float (&row_sum)[2]) const {
    const float factor = score.scale * exponent_scale;
    const float shift[2] = {-finite(row_max[0]) * exponent_scale, -finite(row_max[1]) * exponent_scale};
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < count; i += 8) {
      unsigned pairs[4];
      this->read_biases(i, pairs);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float bias = e % 2 == 0 ? ptx::unpack_low<features.bias_dtype>(pairs[e / 2])
                                      : ptx::unpack_high<features.bias_dtype>(pairs[e / 2]);
        S[i + e] = ptx::exp2(ptx::fma(S[i + e], factor, ptx::fma(bias, exponent_scale, shift[row_of(e)])));
        sums[e % 4] += S[i + e];
      }
    }
    row_sum[0] += sums[0] + sums[1];
    row_sum[1] += sums[2] + sums[3];
  }

  /// ALiBi where all keys are on one side of the diagonal: what it adds is linear in the key, by `slope`.
  __device__ __forceinline__ void exponentiate_sloped(Tile& S, int kv_begin, const float (&row_max)[2], float (&row_sum)[2],
                                                      float slope) const {
    const int first_row = ptx::registers_fresh(row);
    const float factor = score.scale * exponent_scale, of_key = slope * exponent_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Large terms, the distance of the first key and the maximum, cancel before the score is added.
      const float first =
          ptx::fma(added_to(first_row + 8 * r, kv_begin).distance, -of_key, -finite(row_max[r]) * exponent_scale);
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) != r) continue;
        S[i] = ptx::exp2(ptx::fma(S[i], factor, ptx::fma(of_key, static_cast<float>(key_of(i)), first)));
        sums[i % 2] += S[i];
      }
      row_sum[r] += sums[0] + sums[1];
    }
  }

  /// cap tanh(x) = dot scale p(x^2), to 6e-7.
  template <int terms>
  __device__ __forceinline__ void exponentiate_capped(Tile& S, int kv_begin, const float (&row_max)[2], float (&row_sum)[2],
                                                      float to_x, const float (&p)[terms]) const {
    const int first_row = ptx::registers_fresh(row);
    float factor[terms];  // of the powers of dot^2
    float power = score.scale * exponent_scale;
#pragma unroll
    for (int t = 0; t < terms; ++t, power *= to_x * to_x) factor[t] = p[t] * power;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Added added = added_to(first_row + 8 * r, kv_begin);
      const float shift = -finite(row_max[r]) * exponent_scale;
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) != r) continue;
        const float square = S[i] * S[i];
        float slope = factor[terms - 1];
#pragma unroll
        for (int t = terms - 2; t >= 0; --t) slope = ptx::fma(slope, square, factor[t]);
        const float rest = features.bias ? (added.at(key_of(i), this->bias.at(i)) - finite(row_max[r])) * exponent_scale
                                         : ptx::fma(added.at(key_of(i), 0), exponent_scale, shift);
        S[i] = ptx::exp2(ptx::fma(S[i], slope, rest));
        sums[i % 2] += S[i];
      }
      row_sum[r] += sums[0] + sums[1];
    }
  }

  /// What decides on a block of this thread's scores.
  struct Draw {
    tile::Dropout dropout;
    unsigned rows, columns;
  };
  __device__ __forceinline__ Draw draw(const AttentionArgs& args, const forward_sm90::Tile& tile, int kv_begin) const {
    Draw draw{.dropout = {args, tile.sequence.batch_idx, tile.head_idx}};
    if constexpr (features.dropout) {
      draw.dropout.key0 = ptx::shuffle(draw.dropout.key0, 0);  // known to be uniform: so are the keys of the rounds
      draw.dropout.key1 = ptx::shuffle(draw.dropout.key1, 0);
      draw.rows = tile::Dropout::row_counter(row);
      draw.columns = ptx::registers_fresh(tile::Dropout::column_counter(kv_begin + column));
    }
    return draw;
  }

  /// What dropout keeps may be far below a row's reference, and is scaled up at the end: in float16 it is scaled out of the
  /// subnormal numbers. What overflows then makes O infinite, and Epilogue sees to it.
  static constexpr float P_scale = features.dropout && Shape::type == Type::float16 ? 256.0f : 1.0f;

  /// Dropout, once the row sums have taken the probabilities in. What is kept is scaled at the end of the tile.
  __device__ __forceinline__ static void drop(Tile& S, const Draw& draw) {
    if constexpr (features.dropout) {
#pragma unroll
      for (int i = 0; i < count; i += 16) {
        tile::DropoutWords random[2];
        draw.dropout.words(draw.rows, draw.columns + i / 2, random);
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          const unsigned word = random[e / 8].at(row_of(e), e / 4 % 2, e % 2);
          S[i + e] = word >= draw.dropout.threshold ? S[i + e] * P_scale : 0.0f;
        }
      }
    }
  }

  /// P as the A operand of P V.
  __device__ __forceinline__ static void pack(const Tile& S, Packed& P) {
#pragma unroll
    for (int i = 0; i < count; i += 8) {
#pragma unroll
      for (int p = 0; p < 4; ++p) P[i / 8][p] = ptx::pack<Shape::type>(S[i + 2 * p], S[i + 2 * p + 1]);
    }
  }

  /// A row that has seen no key has no maximum; any number will do.
  __device__ __forceinline__ static float finite(float maximum) { return maximum == -tile::infinity ? 0.0f : maximum; }
};

}  // namespace flash_attention::forward_sm90
