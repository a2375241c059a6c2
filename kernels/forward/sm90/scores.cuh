#pragma once

// What happens to a tile of scores in registers between Q K^T and P V: options and mask, softmax, dropout, packing.

#include "forward/sm90/added.cuh"
#include "forward/sm90/tile_scheduler.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/dropout.cuh"
#include "tile/key_source.cuh"

namespace flash_attention::forward_sm90 {

/// The rows of one thread: rows `row` and `row + 8` of the tile, and in each group of 8 keys the two from `column` on. S[i]
/// is row (i / 2) % 2, key 8 (i / 4) + column + i % 2 (ptx/wgmma.cuh).
template <ForwardConfig config>
struct ScoreMath {
  using Shape = forward_sm90::Shape<config>;
  static constexpr Features features = config.features;
  static constexpr int block_kv = Shape::score_keys;
  static constexpr int count = block_kv / 2;
  using Added = forward_sm90::Added<features>;
  using Tile = float[count];
  using Packed = unsigned[block_kv / 16][4];

  tile::Score<features> score;
  float exponent_scale;  // softmax is 2^(exponent_scale (s - maximum))
  int row;
  int column;

  __device__ __forceinline__ ScoreMath(const AttentionArgs& args, const forward_sm90::Tile& tile, int first_row, int lane)
      : score(args, tile.sequence, tile.head_idx),
        exponent_scale(score.unit_scale() * tile::log2_e),
        row(first_row + lane / 4),
        column(2 * (lane % 4)) {}

  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 % 2; }
  __device__ __forceinline__ static constexpr int key_of(int i) { return 8 * (i / 4) + i % 2; }

  /// tile::Score::in_units, with a soft cap of two instructions of the special function unit: cap tanh(x) is
  /// cap - 2 cap / (1 + e^2x), whose error of 1e-7 cap is nothing beside that of a 16-bit dot product.
  __device__ __forceinline__ float in_units(float dot, float added) const {
    if constexpr (features.softcap) {
      const float exponential = ptx::exp2(dot * (2.0f * tile::log2_e * score.scale / score.softcap));
      return ptx::fma(-2.0f * score.softcap, ptx::reciprocal(1.0f + exponential), score.softcap) + added;
    }
    return ptx::fma(dot, score.scale, added);
  }

  /// Soft cap, bias and ALiBi where no score needs a test. Rows past the last query repeat it: bias has no row for them.
  __device__ __forceinline__ void modify(Tile& S, int kv_begin) const {
    if constexpr (!tile::Score<features>::linear) {
      const int first_row = ptx::registers_fresh(row);  // nothing of this is worked out before the scores are there
      const Added added[2] = {added_to(first_row, kv_begin), added_to(first_row + 8, kv_begin)};
#pragma unroll
      for (int i = 0; i < count; ++i) {
        S[i] = programmed(in_units(S[i], added[row_of(i)].at(key_of(i))), first_row, kv_begin, i);
      }
    }
  }
  /// What the program makes of S[i].
  __device__ __forceinline__ float programmed(float s, int first_row, int kv_begin, int i) const {
    return score.programmed(s, tile::min(first_row + 8 * row_of(i), score.len_q - 1), kv_begin + column + key_of(i));
  }
  __device__ __forceinline__ Added added_to(int q, int kv_begin) const {
    return {score, tile::min(q, score.len_q - 1), kv_begin + column};
  }

  /// The same for an edge block: scores that are not visible become -inf, whatever they were. At the left edge of a window,
  /// before the interior, every query sees the last key of the block.
  template <bool left_edge = false, bool modifies = !tile::Score<features>::linear>
  __device__ __forceinline__ void modify_and_mask(Tile& S, int kv_begin) const {
    int begin[2], end[2];  // the keys of the block that a row sees, counted from kv_begin + column
    const int first_row = ptx::registers_fresh(row);  // worked out for each block, not kept
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first_row + 8 * r;
      int first = 0, last = score.visible_kv;
      if constexpr (features.window_left) first = q + score.diagonal - score.window_left;
      if constexpr (features.left_padding) first = features.window_left ? tile::max(first, score.first_kv) : score.first_kv;
      if constexpr (features.window_right) last = tile::min(last, q + score.diagonal + score.window_right + 1);
      if (q >= score.len_q) last = 0;
      begin[r] = first - kv_begin - column;
      end[r] = last - kv_begin - column;
    }
    const Added added[2] = {added_to(first_row, kv_begin), added_to(first_row + 8, kv_begin)};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int r = row_of(i);
      bool visible = left_edge || key_of(i) < end[r];
      if constexpr (Shape::left_edge) visible = visible && key_of(i) >= begin[r];
      if constexpr (features.mask) {
        visible = visible && score.mask[(row + 8 * r) * score.mask_stride + kv_begin + column + key_of(i)] != 0;
      }
      if constexpr (modifies) {
        S[i] = visible ? programmed(in_units(S[i], added[r].at(key_of(i))), first_row, kv_begin, i) : -tile::infinity;
      } else {
        S[i] = visible ? S[i] : -tile::infinity;
      }
    }
  }

  /// Raises the running maximum of both rows by this block; `correction` is what older sums must be multiplied by.
  __device__ __forceinline__ void raise_maximum(const Tile& S, float (&row_max)[2], float (&correction)[2]) const {
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
      correction[r] = ptx::exp2((row_max[r] - finite(raised)) * exponent_scale);
      row_max[r] = raised;
    }
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
        S[i] = ptx::exp2(features.bias || features.score_program ? (S[i] - finite(row_max[r])) * exponent_scale
                                                                 : ptx::fma(S[i], exponent_scale, shift));
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
      const float largest = largest_of(S) * to_x;
      if (ptx::all(largest <= 0.25f)) {
        ptx::path<"forward/sm90 soft cap of three terms">();
        return weigh_capped(S, kv_begin, row_max, row_sum, to_x, {0.99999960f, -0.33321908f, 0.12841613f});
      }
      if (ptx::all(largest <= 0.5f)) {
        ptx::path<"forward/sm90 soft cap of four terms">();
        return weigh_capped(S, kv_begin, row_max, row_sum, to_x, {0.99999946f, -0.33326318f, 0.13190297f, -0.04440222f});
      }
      ptx::path<"forward/sm90 soft cap by exponential">();
    }
    modify(S, kv_begin);
    exponentiate(S, row_max, row_sum);
  }

  /// The largest magnitude among this thread's scores. Magnitudes compare like their bits, and integers three at a time.
  __device__ __forceinline__ static float largest_of(const Tile& S) {
    int largest[4] = {};  // four chains of comparisons
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const int first = __builtin_bit_cast(int, ptx::max(ptx::abs(S[i]), ptx::abs(S[i + 1])));
      const int second = __builtin_bit_cast(int, ptx::max(ptx::abs(S[i + 2]), ptx::abs(S[i + 3])));
      largest[i / 4 % 4] = tile::max(tile::max(first, second), largest[i / 4 % 4]);
    }
    const int of_all = tile::max(tile::max(largest[0], largest[1]), tile::max(largest[2], largest[3]));
    return __builtin_bit_cast(float, of_all);
  }

  /// cap tanh(x) = dot scale p(x^2), to 6e-7.
  template <int terms>
  __device__ __forceinline__ void weigh_capped(Tile& S, int kv_begin, const float (&row_max)[2], float (&row_sum)[2],
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
        const float rest = features.bias ? (added.at(key_of(i)) - finite(row_max[r])) * exponent_scale
                                         : ptx::fma(added.at(key_of(i)), exponent_scale, shift);
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

  /// What dropout keeps may be far below a row's reference, and is scaled up at the end: in float16 it is lifted out of the
  /// subnormal numbers. What overflows then makes O infinite, and Epilogue sees to it.
  static constexpr float lift = features.dropout && Shape::type == Type::float16 ? 256.0f : 1.0f;

  /// Dropout, once the row sums have taken the probabilities in. What is kept is scaled at the end of the tile.
  __device__ __forceinline__ static void drop(Tile& S, const Draw& draw) {
    if constexpr (features.dropout) {
#pragma unroll
      for (int i = 0; i < count; i += 8) {
        const tile::DropoutWords random = draw.dropout.words(draw.rows, draw.columns + i / 2);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          S[i + e] = random.at(row_of(e), e / 4, e % 2) >= draw.dropout.threshold ? S[i + e] * lift : 0.0f;
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

  /// Whether the probability of this query and key reaches the output. For the rare cases that ask key by key.
  __device__ __forceinline__ bool reaches_output(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                                 int key) const {
    bool result = score.visible(q, key);
    if constexpr (features.score_program) result = result && score_of(args, tile, q, key) != -tile::infinity;
    if constexpr (features.dropout)
      result = result && tile::Dropout(args, tile.sequence.batch_idx, tile.head_idx).keeps(q, key);
    return result;
  }

  /// The score of a visible pair, by one thread.
  __device__ __forceinline__ float score_of(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                            int key) const {
    using Element = typename Shape::Element;
    const Element* Q = tile::query_rows<const Element, features>(args.Q, tile.sequence, tile.head_idx).row(q);
    const Element* K =
        tile::key_source<const Element, features>(args, args.K, tile.sequence, tile.head_idx / args.group).row(key);
    float dot = 0;
#pragma unroll 1
    for (int d = 0; d < config.head_dim; ++d) dot = ptx::fma(ptx::to_float(Q[d]), ptx::to_float(K[d]), dot);
    return score.full(dot, q, key);
  }

  /// A row that has seen no key has no maximum; any number will do.
  __device__ __forceinline__ static float finite(float maximum) { return maximum == -tile::infinity ? 0.0f : maximum; }
};

}  // namespace flash_attention::forward_sm90
