#pragma once

// From the products S = Q K^T and dP = dO V^T of a tile, in registers, to P and dS: options, mask, dropout.
//
// The tile may lie either way: with the keys along the rows (S^T, for dK and dV) or with the queries along the rows (S, for
// dQ). Thread t of a warpgroup holds, in register i (ptx/wgmma.cuh), row 16 (t / 32) + lane / 4 + 8 ((i / 2) % 2) and
// column 8 (i / 4) + 2 (lane % 4) + i % 2.

#include "backward/sm90/shape.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/dropout.cuh"
#include "tile/soft_cap.cuh"

namespace flash_attention::backward_sm90 {

enum class Rows : int { keys, queries };

/// at_score: dS is taken at the score with its bias, not at the dot product.
template <BackwardConfig config, Rows rows, int columns, bool at_score = false>
struct ScoreMath {
  static constexpr Features features = config.features;
  static constexpr int count = columns / 2;
  static constexpr int words = tile::ceil_div(count, 32);
  using Tile = float[count];
  using Packed = unsigned[columns / 16][4];
  static constexpr Type type = features.dtype;
  static constexpr bool linear = tile::Score<features>::linear;
  static constexpr bool reads_scores = features.bias || features.score_program;  // needs the place of each score

  const tile::Score<features>& score;
  const tile::Dropout& dropout;
  float exponent_scale;
  int q_begin;            // of the tile
  int kv_begin;           // of the tile
  int row;                // this thread's first row, in the tile
  int column;             // this thread's first column, in the tile
  bool edge;              // some scores of the tile are hidden
  bool nonfinite_row[2];  // Rows::keys: the key holds a NaN or Inf, which was taken out of shared memory

  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 % 2; }
  __device__ __forceinline__ static constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }
  __device__ __forceinline__ int query(int i) const {
    return q_begin + (rows == Rows::keys ? column + column_of(i) : row + 8 * row_of(i));
  }
  __device__ __forceinline__ int key(int i) const {
    return kv_begin + (rows == Rows::keys ? row + 8 * row_of(i) : column + column_of(i));
  }

  using Pair = ptx::Vector<float, 2>;

  /// Statistics of the queries of registers i and i + 1, where the queries lie along the columns.
  __device__ __forceinline__ Pair along_columns(const float (&values)[tile_rows], int i) const {
    return *reinterpret_cast<const Pair*>(&values[column + column_of(i)]);
  }

  /// Bits of the registers whose score is hidden, and of those that dropout drops.
  struct Marks {
    unsigned hidden[words] = {};
    unsigned dropped[words] = {};

    __device__ __forceinline__ bool is_hidden(int i) const { return hidden[i / 32] >> (i % 32) & 1; }
    __device__ __forceinline__ bool is_dropped(int i) const { return dropped[i / 32] >> (i % 32) & 1; }
  };

  __device__ __forceinline__ void mark(Marks& marks) const {
    if (edge) mark_hidden(marks);
    if constexpr (features.dropout) mark_dropped(marks);
  }

  /// S becomes P before dropout, times the slope of the soft cap and of the program where there is one. lse2(i) are the
  /// statistics of the queries of registers i and i + 1. take(i, p, q) gets their probabilities after dropout and without
  /// that slope.
  template <typename Lse2, typename Take>
  __device__ __forceinline__ void probabilities(Tile& S, Marks& marks, Lse2 lse2, Take take) const {
    mark(marks);
    if (edge) {  // one branch for the tile, not one for each score
      weigh_tile<true>(S, marks, lse2, take);
    } else {
      weigh_tile<false>(S, marks, lse2, take);
    }
  }

  /// dP becomes dS = P * (dP - delta).
  template <typename Delta>
  __device__ __forceinline__ void gradients(const Tile& S, Tile& dP, const Marks& marks, Delta delta) const {
    if (edge) {
      differentiate_tile<true>(S, dP, marks, delta);
    } else {
      differentiate_tile<false>(S, dP, marks, delta);
    }
  }

  /// probabilities() and gradients() in one pass, where dP is there when S is: P and dS as operands of the next products.
  template <typename Lse2, typename Delta>
  __device__ __forceinline__ void operands(Tile& S, Tile& dP, Lse2 lse2, Delta delta, Packed& P, Packed& dS) const {
    Marks marks;
    mark(marks);
    if (edge) {
      operands_of_tile<true>(S, dP, marks, lse2, delta, P, dS);
    } else {
      operands_of_tile<false>(S, dP, marks, lse2, delta, P, dS);
    }
  }

  /// A tile as the A operand of the next product: two neighbours to a register.
  __device__ __forceinline__ static void pack(const Tile& values, Packed& packed) {
#pragma unroll
    for (int i = 0; i < count; i += 2) packed[i / 8][i / 2 % 4] = ptx::pack<type>(values[i], values[i + 1]);
  }

 private:
  template <bool some_hidden, typename Lse2, typename Delta>
  __device__ __forceinline__ void operands_of_tile(Tile& S, Tile& dP, const Marks& marks, Lse2 lse2, Delta delta, Packed& P,
                                                   Packed& dS) const {
    weigh_tile<some_hidden>(S, marks, lse2, [&](int i, float p, float q) {
      P[i / 8][i / 2 % 4] = ptx::pack<type>(p, q);
      differentiate_pair<some_hidden>(S, dP, i, marks, delta(i));
      dS[i / 8][i / 2 % 4] = ptx::pack<type>(dP[i], dP[i + 1]);
    });
  }

  template <bool some_hidden, typename Lse2, typename Take>
  __device__ __forceinline__ void weigh_tile(Tile& S, const Marks& marks, Lse2 lse2, Take take) const {
#pragma unroll
    for (int group = 0; group < count; group += 4) {
      const int shift = reads_scores ? ptx::registers_fresh(0) : 0;  // see mark_hidden
#pragma unroll
      for (int i = group; i < group + 4; i += 2) {
        const auto statistics = lse2(i);
        const float first = probability_of<some_hidden>(S[i], i, shift, marks, statistics[0]);
        take(i, first, probability_of<some_hidden>(S[i + 1], i + 1, shift, marks, statistics[1]));
      }
    }
  }

  /// ALiBi's distance of the query and the key of register i.
  __device__ __forceinline__ float distance(int i) const {
    constexpr int sign = rows == Rows::keys ? 1 : -1;
    const float first = static_cast<float>(q_begin - kv_begin + score.len_kv - score.len_q + sign * (column - row));
    return ptx::abs(first + static_cast<float>(sign * (column_of(i) - 8 * row_of(i))));
  }

  /// The exponent of a score with options.
  __device__ __forceinline__ float exponent_of(float dot, int i, int shift, float lse2, float& slope) const {
    float value = dot, factor = score.scale, rest = 0;  // the score is value * factor + rest
    if constexpr (features.softcap) {
      const tile::SoftCapped capped(dot, score.scale, score.softcap);
      if constexpr (!at_score) slope = capped.slope();
      value = capped.shortfall, factor = -score.softcap, rest = score.softcap;
    }
    if constexpr (reads_scores) {
      // Rows past the last query have no bias; their lse2 is +inf, which makes them 0.
      const int q = tile::min(query(i) + shift, score.len_q - 1), k = tile::min(key(i), score.len_kv - 1);
      const float bent = features.softcap ? ptx::fma(value, factor, rest) : dot * score.scale;
      const float whole = score.template programmed<true>(bent + score.added(q, k), q, k, slope);
      if (features.score_hides && whole == -tile::infinity) return whole;  // hidden, also where lse2 is NaN
      return ptx::fma(whole, exponent_scale, -lse2);
    }
    rest = features.softcap ? ptx::fma(rest, tile::log2_e, -lse2) : -lse2;  // large terms cancel first
    if constexpr (features.alibi) rest = ptx::fma(distance(i), -tile::log2_e * score.slope, rest);
    return ptx::fma(value, tile::log2_e * factor, rest);
  }

  /// One score of probabilities(); returns the dropped and scaled probability.
  template <bool some_hidden>
  __device__ __forceinline__ float probability_of(float& S, int i, int shift, const Marks& marks, float lse2) const {
    float slope = 1;
    S = ptx::exp2(linear ? ptx::fma(S, exponent_scale, -lse2) : exponent_of(S, i, shift, lse2, slope));
    [[maybe_unused]] const bool nothing =
        features.score_hides && S == 0;  // a score of -inf: hidden, whatever the key holds
    if constexpr (some_hidden) {
      if (rows == Rows::keys && nonfinite_row[row_of(i)]) S = __builtin_bit_cast(float, 0x7fffffffu);  // NaN
      if (marks.is_hidden(i)) S = 0;
    }
    if constexpr (features.score_hides) S = nothing ? 0 : S;
    float weight = S;
    if constexpr (features.dropout) weight = marks.is_dropped(i) ? 0 : S * dropout.keep_scale;
    if constexpr (features.softcap || features.score_program) S = features.score_hides && S == 0 ? 0 : S * slope;
    return weight;
  }

  template <bool some_hidden, typename Delta>
  __device__ __forceinline__ void differentiate_tile(const Tile& S, Tile& dP, const Marks& marks, Delta delta) const {
#pragma unroll
    for (int i = 0; i < count; i += 2) differentiate_pair<some_hidden>(S, dP, i, marks, delta(i));
  }

  template <bool some_hidden>
  __device__ __forceinline__ void differentiate_pair(const Tile& S, Tile& dP, int i, const Marks& marks,
                                                     const Pair& delta) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float incoming = dP[i + e];
      if constexpr (features.dropout) incoming = marks.is_dropped(i + e) ? 0 : incoming * dropout.keep_scale;
      dP[i + e] = S[i + e] * (incoming - delta[e]);
      if (some_hidden && (marks.is_hidden(i + e) || (features.score_hides && S[i + e] == 0))) dP[i + e] = 0;
    }
  }

  // The loops run one group of registers at a time (the group's first query is hidden from the compiler), so that addresses
  // and random words of all groups are not held at once.

  __device__ __forceinline__ void mark_hidden(Marks& marks) const {
#pragma unroll
    for (int group = 0; group < count; group += 4) {
      const int shift = ptx::registers_fresh(0);
#pragma unroll
      for (int i = group; i < group + 4; ++i) {
        if (!score.visible(query(i) + shift, key(i))) marks.hidden[i / 32] |= 1u << (i % 32);
      }
    }
  }

  /// A Philox block decides on eight scores. With the queries along the rows a thread holds all of them. With the keys
  /// along the rows it holds those of an even or of an odd key, and the lane of the key's neighbour the others: each of the
  /// two works out half of the blocks, of the even or of the odd queries, for both.
  __device__ __forceinline__ void mark_dropped(Marks& marks) const {
    const int odd = rows == Rows::keys ? row % 2 : 0;
    unsigned of_even[words] = {}, of_odd[words] = {};  // Rows::keys: of the blocks' even and odd keys
#pragma unroll
    for (int group = 0; group < count; group += 8) {
      const int shift = ptx::registers_fresh(0);
      const tile::DropoutWords random =
          dropout.words(tile::Dropout::row_counter(query(group) + odd + shift), tile::Dropout::column_counter(key(group)));
#pragma unroll
      for (int e = 0; e < (rows == Rows::keys ? 4 : 8); ++e) {
        if constexpr (rows == Rows::keys) {
          const int i = group + e / 2 * 4 + e % 2 * 2;  // of the even query; word 2 r + c is that of query + 8 r, key + 8 c
          if (random.word[e] < dropout.threshold) of_even[i / 32] |= 1u << (i % 32);
          if (tile::DropoutWords::halves_exchanged(random.word[e]) < dropout.threshold) of_odd[i / 32] |= 1u << (i % 32);
        } else {
          const int i = group + e;
          if (random.at(row_of(e), e / 4, e % 2) < dropout.threshold) marks.dropped[i / 32] |= 1u << (i % 32);
        }
      }
    }
    if constexpr (rows == Rows::keys) {
#pragma unroll
      for (int w = 0; w < words; ++w) {
        const unsigned own = odd ? of_odd[w] : of_even[w], others = odd ? of_even[w] : of_odd[w];
        marks.dropped[w] = own << odd | ptx::shuffle_xor(others, 4) << (1 - odd);
      }
    }
  }
};

}  // namespace flash_attention::backward_sm90
