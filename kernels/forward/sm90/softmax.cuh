#pragma once

// From dot products to probabilities, for a tile of scores in registers: options (soft cap, bias, ALiBi, program), the mask
// of edge blocks, the online maximum, exponentials, dropout, and the conversion to 16 bits.

#include "abi/config.h"
#include "forward/sm90/schedule.cuh"
#include "ptx/math.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/bias_pairs.cuh"
#include "tile/dropout.cuh"
#include "tile/fixed_order.cuh"
#include "tile/key_source.cuh"
#include "tile/score.cuh"
#include "tile/soft_cap.cuh"
#include "tile/softmax.cuh"

namespace flash_attention::forward_sm90 {

/// What is added to the scaled scores of a row: ALiBi, and a bias. The bias is read here if `reads_bias`, else passed in.
template <abi::Features features, bool reads_bias>
struct Added {
  const typename tile::Score<features>::Bias* bias_row;
  float slope;
  float distance;  // from the first key to the diagonal

  __device__ __forceinline__ Added(const tile::Score<features>& score, int q, int first_key) {
    if constexpr (reads_bias) bias_row = score.bias + q * score.bias_stride + first_key;
    if constexpr (features.alibi) slope = score.slope;
    if constexpr (features.alibi) distance = static_cast<float>(q + score.sight.len_kv - score.sight.len_q - first_key);
  }
  /// The sum for `key`; `bias` is one that was loaded before.
  __device__ __forceinline__ float at(int key, float bias) const {
    float result = bias;
    if constexpr (reads_bias) result = tile::bounded_bias<features.bias_dtype>(bias_row[key]);
    if constexpr (features.alibi) result = ptx::fma(-slope, ptx::abs(distance - static_cast<float>(key)), result);
    return result;
  }
};

// The steps from Q K^T to P V, for a tile of scores in registers:
//
//     options and mask     modify, modify_and_mask
//     online maximum       raise_maximum                     edge blocks, and all blocks of a retry
//     P = 2^(S - max)      exponentiate, probability_of      and this thread's part of the row sums
//     dropout              drop
//     P in 16 bits         pack

/// The rows of one thread: rows `row` and `row + 8` of the tile, and in each group of 8 keys the two from `column` on. S[i]
/// is row (i / 2) % 2, key 8 (i / 4) + column + i % 2 (ptx/wgmma.cuh).
template <ForwardConfig config>
struct ScoreMath {
  using Shape = forward_sm90::Shape<config>;
  static constexpr Features features = config.features;
  static constexpr int block_kv = Shape::score_keys;
  static constexpr int count = block_kv / 2;
  // Wide heads have no registers for biases that are loaded ahead.
  static constexpr bool loads_bias = features.bias && !Shape::wide;
  using Added = forward_sm90::Added<features, features.bias && !loads_bias>;
  using Tile = float[count];
  using Packed = unsigned[block_kv / 16][4];
  using Statistics = tile::RowStatistics<features.max_logit, features.entropy>;
  // Then one function takes all interior blocks: those for a single option would each have to know of statistics.
  static constexpr bool has_statistics = features.max_logit || features.entropy;
  using ProgramRow = typename tile::Score<features>::ProgramRow;
  using ProgramKey = typename tile::Score<features>::ProgramKey;

  tile::Score<features> score;
  mutable tile::BiasPairs<features, loads_bias ? count : 0> bias;  // of the next block's scores
  mutable unsigned bias_smem;                                      // of this lane's row, if the biases are in shared memory
  float exponent_scale;                                            // softmax is 2^(exponent_scale (s - maximum))
  int row;
  int column;

  __device__ __forceinline__ ScoreMath(const AttentionArgs& args, const forward_sm90::Tile& tile, int first_row, int lane)
      : score(args, tile.sequence, tile.head_idx),
        exponent_scale(score.unit_scale() * tile::log2_e),
        row(first_row + lane / 4),
        column(2 * (lane % 4)) {}

  /// Starts to load the biases of a block. Called when the previous block's scores are complete, before this block's are.
  __device__ __forceinline__ void load_bias(int kv_begin) const {
    if constexpr (features.bias && Shape::bias_stages == 0)
      bias.load(score, ptx::hide_from_compiler(row), kv_begin + column, kv_begin + block_kv);
  }
  /// Prefetches the biases of a later block into L2: a warp's 16 rows.
  __device__ __forceinline__ void prefetch_bias(int kv_begin) const {
    if constexpr (features.bias && Shape::bias_stages == 0) {
      const int own = ptx::hide_from_compiler(row), lane = 4 * (own % 8) + column / 2;
      bias.template prefetch<16, block_kv>(score, own / 16 * 16, kv_begin, lane);
    }
  }

  /// Reads the biases of S[i] to S[i + 7]: for the whole warp, those of 16 keys.
  __device__ __forceinline__ void read_biases(int i, unsigned (&pairs)[4]) const {
    constexpr int bytes_of_chunk = wg_rows * Shape::bias_keys * 2, step = i_of_chunk;
    ptx::ldmatrix_x4(pairs, (bias_smem ^ i % step * 4) + i / step * bytes_of_chunk);
  }
  static constexpr int i_of_chunk = Shape::bias_keys / 2;
  /// Reads all biases of the block to registers.
  __device__ __forceinline__ void read_biases() const {
    if constexpr (Shape::bias_stages > 0) {
#pragma unroll
      for (int i = 0; i < count; i += 8) {
        unsigned pairs[4];
        read_biases(i, pairs);
#pragma unroll
        for (int p = 0; p < 4; ++p) bias.pairs[i / 2 + p] = __builtin_bit_cast(typename decltype(bias)::Pair, pairs[p]);
      }
    }
  }

  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 % 2; }
  __device__ __forceinline__ static constexpr int key_of(int i) { return 8 * (i / 4) + i % 2; }

  /// As tile::Score::in_units, but with a faster soft cap. If all scores of an interior block are small, probability_of()
  /// takes another path.
  template <bool interior = false>
  __device__ __forceinline__ float in_units(float dot, float added) const {
    if constexpr (Shape::ordered) return tile::ordered_score<features.softcap>(dot, score.scale, score.softcap, added);
    return tile::capped_score<features.softcap, interior>(dot, score.scale, score.softcap, added);
  }

  /// Applies soft cap, bias, ALiBi and program without hiding scores. Rows past the last query use the last query's bias.
  template <bool interior = false>
  __device__ __forceinline__ void modify(Tile& S, int kv_begin) const {
    if constexpr (!tile::Score<features>::linear) {
      const int first_row = ptx::hide_from_compiler(row);  // computed only when the scores are ready
      const Added added[2] = {added_to(first_row, kv_begin), added_to(first_row + 8, kv_begin)};
      if constexpr (features.score_program) return modify_by_program<interior>(S, first_row, kv_begin, added);
      if constexpr (Shape::ordered && features.softcap && !features.bias) {
        const tile::OrderedCap cap(score.scale, score.softcap);
        if (ptx::all(cap.is_small(tile::largest_magnitude(S)))) {
          ptx::path<"forward/sm90 ordered cap of small scores">();
#pragma unroll
          for (int i = 0; i < count; ++i) S[i] = cap.of_small(S[i], added[row_of(i)].at(key_of(i), 0));
          return;
        }
      }
      if (features.bias && bias.some_large()) {
        add<true, interior>(S, added);
      } else {
        add<false, interior>(S, added);
      }
    }
  }
  template <bool large_bias, bool interior>
  __device__ __forceinline__ void add(Tile& S, const Added (&added)[2]) const {
#pragma unroll
    for (int i = 0; i < count; ++i)
      S[i] = in_units<interior>(S[i], added[row_of(i)].at(key_of(i), bias.template at<large_bias>(i)));
  }

  /// The program's data of a row. The data of a key is shared by both rows of a thread.
  __device__ __forceinline__ ProgramRow program_row(int q) const {
    return score.program.row(tile::min(q, score.sight.len_q - 1));
  }
  template <bool interior>
  __device__ __forceinline__ void modify_by_program(Tile& S, int first_row, int kv_begin, const Added (&added)[2]) const {
    const ProgramRow rows[2] = {program_row(first_row), program_row(first_row + 8)};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (row_of(i) != 0) continue;
      const ProgramKey key = score.program.key(kv_begin + column, key_of(i));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& s = S[i + 2 * r];
        const float before = in_units(s, added[r].at(key_of(i), bias.at(i + 2 * r)));
        s = interior ? programmed_inside(before, rows[r], key) : score.programmed(before, rows[r], key);
      }
    }
  }
  /// As Score::programmed, in a block that keeps its rows' references, which are bounded. A much larger score overflows,
  /// and the tile is repeated with a running maximum. A very negative score is bounded here, because the reference could be
  /// very negative, too.
  __device__ __forceinline__ float programmed_inside(float s, const ProgramRow& row, const ProgramKey& key) const {
    if constexpr (!features.score_program) {
      return s;
    } else if constexpr (features.score_hides || !tile::Score<features>::may_be_huge) {
      return score.programmed(s, row, key);
    } else {
      return ptx::max_or_nan(score.program.score(s, row, key), -tile::largest_score);
    }
  }
  /// The program's result for S[i].
  __device__ __forceinline__ float programmed(float s, const ProgramRow& of_row, int kv_begin, int i) const {
    return score.programmed(s, of_row, score.program.key(kv_begin + column, key_of(i)));
  }
  __device__ __forceinline__ Added added_to(int q, int kv_begin) const {
    return {score, tile::min(q, score.sight.len_q - 1), kv_begin + column};
  }

  /// The same for an edge block; scores that are not visible become -inf, even if they are NaN. left_edge: the block is at
  /// the left edge of a window, before the interior, so every query sees its last key.
  template <bool left_edge = false, bool modifies = !tile::Score<features>::linear>
  __device__ __forceinline__ void modify_and_mask(Tile& S, int kv_begin) const {
    int begin[2], end[2];  // the keys of the block that a row sees, counted from kv_begin + column
    const int first_row = ptx::hide_from_compiler(row);  // computed for each block, not kept in registers
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first_row + 8 * r;
      int first = 0, last = score.sight.visible_kv;
      if constexpr (features.window_left) first = score.sight.window_begin(q);
      if constexpr (features.left_padding)
        first = features.window_left ? tile::max(first, score.sight.first_kv) : score.sight.first_kv;
      if constexpr (features.window_right) last = tile::min(last, score.sight.window_end(q));
      if (q >= score.sight.len_q) last = 0;
      begin[r] = first - kv_begin - column;
      end[r] = last - kv_begin - column;
    }
    const Added added[2] = {added_to(first_row, kv_begin), added_to(first_row + 8, kv_begin)};
    const ProgramRow rows[2] = {program_row(first_row), program_row(first_row + 8)};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int r = row_of(i);
      bool visible = left_edge || key_of(i) < end[r];
      if constexpr (Shape::left_edge) visible = visible && key_of(i) >= begin[r];
      if constexpr (features.mask) {
        visible = visible && score.sight.mask[(row + 8 * r) * score.sight.mask_stride + kv_begin + column + key_of(i)] != 0;
      }
      if constexpr (modifies && (loads_bias || !features.bias) && !features.score_program) {
        const float modified = in_units(S[i], added[r].at(key_of(i), bias.at(i)));  // no branch: the bias is loaded
        S[i] = visible ? modified : -tile::infinity;
      } else if constexpr (modifies) {
        S[i] = visible ? programmed(in_units(S[i], added[r].at(key_of(i), bias.at(i))), rows[r], kv_begin, i)
                       : -tile::infinity;
      } else {
        S[i] = visible ? S[i] : -tile::infinity;
      }
    }
  }

  /// Whether the probability of this query and key reaches the output. Only for rare paths that test single keys.
  __device__ __forceinline__ bool reaches_output(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                                 int key) const {
    bool result = score.sight.visible(q, key);
    if constexpr (features.precomputed_mask_bits) result = result && is_in_words(args, tile, q, key);
    if constexpr (features.score_program) result = result && score_of(args, tile, q, key) != -tile::infinity;
    if constexpr (features.dropout)
      result = result && tile::Dropout(args, tile.sequence.batch_idx, tile.head_idx).keeps(q, key);
    return result;
  }

  /// Whether the masks show a pair, by the precomputed mask bits. A tile that the masks show completely has no bits.
  __device__ __forceinline__ bool is_in_words(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                              int key) const {
    if (score.sight.map.template of<mask_unit, mask_unit>(q / mask_unit * mask_unit, key / mask_unit * mask_unit) ==
        TileClass::full)
      return true;
    constexpr int keys = Shape::block_kv / 32;  // keys of a lane
    const auto* const row =
        mask::precomputed_mask_bits<Shape::block_q, Shape::block_kv>(args, tile.list.row_tile, key / Shape::block_kv) +
        q % Shape::block_q;
    const int inside = key % Shape::block_kv;
    return ((*row)[inside % keys] >> inside / keys & 1) != 0;
  }

  /// The score of a visible pair, computed by one thread.
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

  /// Raises the running maximum of both rows. Older sums must be multiplied by `rescale`.
  __device__ __forceinline__ void raise_maximum(const Tile& S, float (&row_max)[2], float (&rescale)[2],
                                                Statistics& statistics, const float (&row_sum)[2]) const {
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
      if constexpr (features.max_logit) statistics.largest[r] = ptx::max(statistics.largest[r], block_max);
      if constexpr (features.entropy)
        statistics.raise(r, (finite(raised) - row_max[r]) * exponent_scale, row_sum[r], rescale[r]);
      row_max[r] = raised;
    }
  }

  /// The probabilities of a row's scores S[i] in the fixed order, and this thread's part of their sum. store(i, p) takes
  /// them.
  template <class Store>
  __device__ __forceinline__ static float sum_in_order(const Tile& S, int r, const tile::ExponentOrigin& from,
                                                       float exponent_scale, bool subtracts, const Store& store) {
    float sum = 0;
#pragma unroll
    for (int i = 2 * r; i < count; i += 8) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float s = S[i + e / 2 * 4 + e % 2];
        p[e] = ptx::exp2(ptx::fma(subtracts ? s - from.origin : s, exponent_scale, -from.shift));
        store(i + e / 2 * 4 + e % 2, p[e]);
      }
      const float four = tile::sum_of_four(p[0], p[1], p[2], p[3]);
      sum = i == 2 * r ? four : sum + four;
    }
    return sum;
  }

  /// Turns scores into probabilities with the references that the rows have.
  __device__ __forceinline__ void exponentiate_in_order(Tile& S, const float (&reference)[2], float (&sum)[2]) const {
    const tile::ExponentOrigin from[2] = {{reference[0], exponent_scale}, {reference[1], exponent_scale}};
    if (ptx::any(from[0].origin != 0 || from[1].origin != 0)) {
#pragma unroll
      for (int i = 0; i < count; ++i) S[i] -= from[row_of(i)].origin;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] = sum_in_order(S, r, from[r], exponent_scale, false, [&](int i, float p) { S[i] = p; });
  }

  /// A block of the fixed order whose rows keep their references. The end of the segment tells if they had to.
  __device__ __forceinline__ void keep_in_order(Tile& S, const float (&reference)[2], float (&row_sum)[2]) const {
    float sum[2];
    exponentiate_in_order(S, reference, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] += sum[r];
  }

  /// Any block of the fixed order: gives a row its reference, or raises it if the sum would become too large. O must be
  /// multiplied by `rescale`.
  __device__ __forceinline__ void take_in_order(Tile& S, float (&row_max)[2], float (&row_sum)[2],
                                                float (&rescale)[2]) const {
    float block_max[2], raised[2], sum[2];
    bool suspect = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      block_max[r] = S[2 * r];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) == r) block_max[r] = ptx::max(block_max[r], S[i]);
      }
      block_max[r] = tile::reduce_quad(block_max[r], [](float a, float b) { return ptx::max(a, b); });
      raised[r] = row_max[r] == -tile::infinity ? block_max[r] : row_max[r];
      const tile::ExponentOrigin from(raised[r], exponent_scale);
      const float largest = ptx::exp2(ptx::fma(block_max[r] - from.origin, exponent_scale, -from.shift));
      suspect = suspect || tile::may_exceed<Shape::type>(largest, row_sum[r]);
    }
    if (ptx::any(suspect)) {
      ptx::path<"forward/sm90 raised reference">();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const tile::ExponentOrigin from(raised[r], exponent_scale);
        const float part = row_sum[r] + sum_in_order(S, r, from, exponent_scale, true, [](int, float) {});
        const float all = tile::reduce_quad(part, [](float a, float b) { return a + b; });
        if (!(all <= tile::largest_sum<Shape::type>)) raised[r] = ptx::max(raised[r], block_max[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = tile::factor_of_raise(row_max[r], raised[r], exponent_scale);
      row_max[r] = raised[r];
    }
    exponentiate_in_order(S, raised, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = ptx::fma(row_sum[r], rescale[r], sum[r]);
  }

  static constexpr bool may_be_huge =
      features.bias || (features.score_program && tile::Program<features.score_program>::largest > 4096.0f);

  /// Whether a row's reference, in powers of 2, is so large that the rounding error of its product with the scale is a
  /// visible change of the exponent. Edge blocks then subtract it before they scale. A tile with interior blocks, which do
  /// not, is repeated.
  __device__ __forceinline__ static bool is_large(float reference) {
    return !may_be_huge && ptx::abs(reference) > tile::large_reference;
  }

  /// As exponentiate(), for references of any size, and scores that have raised the maximum.
  __device__ __forceinline__ void exponentiate_any(Tile& S, const float (&row_max)[2], float (&row_sum)[2],
                                                   Statistics& statistics) const {
    if constexpr (may_be_huge) return exponentiate<false>(S, row_max, row_sum, statistics);
    const float scaled[2] = {finite(row_max[0]) * exponent_scale, finite(row_max[1]) * exponent_scale};
    if (!ptx::any(is_large(scaled[0]) || is_large(scaled[1]))) return exponentiate<false>(S, row_max, row_sum, statistics);
#pragma unroll
    for (int i = 0; i < count; ++i) S[i] -= finite(row_max[row_of(i)]);
    exponentiate<false>(S, {0, 0}, row_sum, statistics);
  }

  /// S = 2^(exponent_scale (S - row_max)); adds the results to this thread's part of the row sums. keeps: the scores have
  /// not raised the maximum.
  template <bool keeps = true, bool some_hidden = true>
  __device__ __forceinline__ void exponentiate(Tile& S, const float (&row_max)[2], float (&row_sum)[2],
                                               Statistics& statistics) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = -finite(row_max[r]) * exponent_scale;
      float even = 0, odd = 0;  // two chains of additions
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (row_of(i) != r) continue;
        if constexpr (features.max_logit && keeps) statistics.largest[r] = ptx::max(statistics.largest[r], S[i]);
        // The rounding error of a huge maximum's product would be an exponent.
        const float exponent =
            may_be_huge ? (S[i] - finite(row_max[r])) * exponent_scale : ptx::fma(S[i], exponent_scale, shift);
        S[i] = ptx::exp2(exponent);
        (i % 2 == 0 ? even : odd) += S[i];
        if constexpr (features.entropy)
          statistics.moment[r] = tile::add_moment<some_hidden>(statistics.moment[r], S[i], exponent);
      }
      row_sum[r] += even + odd;
    }
  }

  /// modify() and exponentiate() in one. If all scores of the warp are small compared to the soft cap, a polynomial
  /// replaces tanh; its last multiplication is the one that the exponent needs anyway.
  __device__ __forceinline__ void probability_of(Tile& S, int kv_begin, const float (&row_max)[2], float (&row_sum)[2],
                                                 Statistics& statistics) const {
    if constexpr (features.softcap && !features.score_program && !has_statistics) {
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
      if (!has_statistics && ptx::all(is_small(row_max[0]) && is_small(row_max[1]))) {
        return exponentiate_biased(S, row_max, row_sum);
      }
      read_biases();
    }
    if constexpr (features.alibi && !features.softcap && !features.bias && !features.score_program && !has_statistics) {
      const int key =
          ptx::hide_from_compiler(row) / 16 * 16 + score.sight.len_kv - score.sight.len_q;  // of the warp's first row
      if (Shape::from_diagonal || ptx::all(kv_begin + block_kv <= key || kv_begin >= key + 16)) {
        ptx::path<"forward/sm90 ALiBi on one side of the diagonal">();
        return exponentiate_sloped(S, kv_begin, row_max, row_sum, kv_begin < key ? score.slope : -score.slope);
      }
    }
    modify<true>(S, kv_begin);
    exponentiate<true, features.score_hides>(S, row_max, row_sum, statistics);
  }

  /// If a bias is the only option. A bias too large for a float gives 0 or Inf here, the same result as if it were bounded
  /// first.
  __device__ __forceinline__ void exponentiate_biased(Tile& S, const float (&row_max)[2], float (&row_sum)[2]) const {
    const float factor = score.scale * exponent_scale;
    const float shift[2] = {-finite(row_max[0]) * exponent_scale, -finite(row_max[1]) * exponent_scale};
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < count; i += 8) {
      unsigned pairs[4];
      read_biases(i, pairs);
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

  /// ALiBi if all keys are on one side of the diagonal: what is added is linear in the key, with `slope`.
  __device__ __forceinline__ void exponentiate_sloped(Tile& S, int kv_begin, const float (&row_max)[2], float (&row_sum)[2],
                                                      float slope) const {
    const int first_row = ptx::hide_from_compiler(row);
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
    const int first_row = ptx::hide_from_compiler(row);
    float factor[terms];  // coefficients of the powers of dot^2
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
        const float rest = features.bias ? (added.at(key_of(i), bias.at(i)) - finite(row_max[r])) * exponent_scale
                                         : ptx::fma(added.at(key_of(i), 0), exponent_scale, shift);
        S[i] = ptx::exp2(ptx::fma(S[i], slope, rest));
        sums[i % 2] += S[i];
      }
      row_sum[r] += sums[0] + sums[1];
    }
  }

  /// The counters that decide which scores of a block dropout drops.
  struct Draw {
    tile::Dropout dropout;
    unsigned rows, columns;
  };
  __device__ __forceinline__ Draw draw(const AttentionArgs& args, const forward_sm90::Tile& tile, int kv_begin) const {
    Draw draw{.dropout = {args, tile.sequence.batch_idx, tile.head_idx}};
    if constexpr (features.dropout) {
      draw.dropout.key0 = ptx::shuffle(draw.dropout.key0, 0);  // the compiler knows: uniform, so the round keys are, too
      draw.dropout.key1 = ptx::shuffle(draw.dropout.key1, 0);
      draw.rows = tile::Dropout::row_counter(row);
      draw.columns = ptx::hide_from_compiler(tile::Dropout::column_counter(kv_begin + column));
    }
    return draw;
  }

  /// A probability that dropout keeps may be far below the row's reference, and is scaled up at the end. In float16 it is
  /// scaled by this factor, out of the subnormal numbers. An overflow makes O infinite, which the epilogue detects.
  static constexpr float P_scale = features.dropout && Shape::type == Type::float16 ? 256.0f : 1.0f;

  /// Applies dropout, after the row sums have been updated. The scaling of kept probabilities is applied at the end of the
  /// tile.
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

  /// A row that has seen no key has the maximum -inf. Any finite reference will do.
  __device__ __forceinline__ static float finite(float maximum) { return maximum == -tile::infinity ? 0.0f : maximum; }
};

}  // namespace flash_attention::forward_sm90
