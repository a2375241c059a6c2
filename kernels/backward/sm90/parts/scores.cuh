#pragma once

// The softmax of backward/sm90, with options, masks and dropout: from the products S = Q K^T and dP = dO V^T of a tile,
// in registers, to P and dS.
//
// The tile has either orientation: with the keys along the rows (S^T, for dK and dV) or with the queries along the rows (S,
// for dQ). Thread t of a warpgroup holds, in register i (ptx/wgmma.cuh), row 16 (t / 32) + lane / 4 + 8 ((i / 2) % 2) and
// column 8 (i / 4) + 2 (lane % 4) + i % 2.

#include "backward/sm90/parts/shape.cuh"
#include "mask/mask_bits.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/bias_pairs.cuh"
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
  static constexpr bool reads_scores = features.bias || features.score_program;
  using Bias = tile::BiasPairs<features, sizeof(typename tile::Score<features>::Bias) == 2 ? count : 0, rows == Rows::keys>;
  static constexpr bool needs_places = features.score_program || (features.bias && !Bias::present);

  const tile::Score<features>& score;
  const tile::Dropout& dropout;
  float exponent_scale;
  int q_begin;            // of the tile
  int kv_begin;           // of the tile
  int row;                // this thread's first row, in the tile
  int column;             // this thread's first column, in the tile
  bool edge;              // some scores of the tile are hidden
  bool nonfinite_row[2];  // Rows::keys: the key held a NaN or Inf, and its row in shared memory is now zeros
  mutable Bias bias{};    // 16-bit biases of the tile, as loaded; probabilities() transposes them

  using Pair = ptx::Vector<float, 2>;
  static constexpr float hidden_probability = -0.0f;  // of a score of -inf

  /// The scores of a tile that a thread of the warpgroup holds. All of them are visible unless the caller sets `edge`.
  __device__ __forceinline__ static ScoreMath of_thread(const tile::Score<features>& score, const tile::Dropout& dropout,
                                                        int q_begin, int kv_begin, int thread) {
    const int lane = thread % 32;
    return {score,          dropout,  score.unit_scale() * tile::log2_e,
            q_begin,        kv_begin, 16 * (thread / 32) + lane / 4,
            2 * (lane % 4), false,    {false, false}};
  }
  /// Rows::keys: `nonfinite_lanes` has a bit for each lane of the warp that has found a NaN or Inf. Lanes 2 r and 2 r +
  /// 1 have looked at row r of the warp's 16 keys (zero_nonfinite_keys).
  __device__ __forceinline__ void take_nonfinite_rows(unsigned nonfinite_lanes, int lane) {
    nonfinite_row[0] = (nonfinite_lanes >> 2 * (lane / 4) & 3) != 0;
    nonfinite_row[1] = (nonfinite_lanes >> 2 * (lane / 4) + 16 & 3) != 0;
  }

  // -- places and marks ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 % 2; }
  __device__ __forceinline__ static constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }
  __device__ __forceinline__ int query(int i) const {
    return q_begin + (rows == Rows::keys ? column + column_of(i) : row + 8 * row_of(i));
  }
  __device__ __forceinline__ int key(int i) const {
    return kv_begin + (rows == Rows::keys ? row + 8 * row_of(i) : column + column_of(i));
  }

  /// One bit a register: its score is hidden; dropout drops it.
  struct Marks {
    unsigned hidden[words] = {};
    unsigned dropped[words] = {};

    __device__ __forceinline__ bool is_hidden(int i) const { return hidden[i / 32] >> (i % 32) & 1; }
    __device__ __forceinline__ bool is_dropped(int i) const { return dropped[i / 32] >> (i % 32) & 1; }
    /// Makes the compiler take the marks for new numbers. Otherwise it would keep the result of each test of a bit.
    __device__ __forceinline__ void test_again() {
#pragma unroll
      for (unsigned& word : dropped) word = ptx::shuffle_xor(word, 0);
    }
  };

  /// The lanes of a warp evaluate boolean masks and programs together, so all of them must call this at the same time.
  static constexpr bool by_votes = (features.mask || features.mask_program) && columns == tile_rows;

  /// Or a launch before this one has evaluated them, and the bits are in words. Windows, lengths, and tiles without
  /// words are computed here, as ranges.
  static constexpr bool by_words = config.mask_bits && rows == Rows::keys;

  /// `words_of_tile` has the words of this tile, or is null.
  __device__ __forceinline__ void mark(Marks& marks, [[maybe_unused]] const unsigned* words_of_tile = nullptr) const {
    if constexpr (by_words) {
      mark_by_words(marks, words_of_tile);
    } else if constexpr (features.list_bits != 0 && rows == Rows::keys) {
      mark_unlisted(marks);
    } else {
      mark_hidden(marks);
    }
    if constexpr (features.dropout) mark_dropped(marks);
  }

  /// Prefetches the bytes of a boolean mask to L2, for 64 queries from `q` on, one query a thread.
  __device__ __forceinline__ static void prefetch_mask(const tile::Visibility<features>& sight, int q, int key,
                                                       int thread) {
    if constexpr (features.mask) {
      if (thread < tile_rows && q + thread < sight.len_q && key < sight.visible_kv)
        ptx::prefetch_L2(sight.mask + (q + thread) * sight.mask_stride + key);
    }
  }

  // The loops run one group of registers at a time: the group's first query is hidden from the compiler, so that it
  // does not hold addresses and random words of all groups at once.

  __device__ __forceinline__ void mark_hidden(Marks& marks) const {
    if (!edge) return;
    if constexpr (by_votes) {
      const mask::Votes<features, rows == Rows::keys> votes{score.sight, q_begin, kv_begin, row, column};
      const ptx::Vector<unsigned, 2> visible = votes.visible();
      marks.hidden[0] = ~(visible[0] | visible[1] << 2);
      return;
    }
#pragma unroll
    for (int group = 0; group < count; group += 4) {
      const int shift = ptx::hide_from_compiler(0);
#pragma unroll
      for (int i = group; i < group + 4; ++i) {
        if (!score.sight.visible(query(i) + shift, key(i))) marks.hidden[i / 32] |= 1u << (i % 32);
      }
    }
  }

  // -- P and dS -----------------------------------------------------------------------------------------------------------

  /// Loads the biases of a tile for a thread of the warpgroup.
  __device__ __forceinline__ static Bias load_bias(const tile::Score<features>& score, int q_begin, int kv_begin,
                                                   int thread) {
    const int warp_row = 16 * (thread / 32), row = thread % 32 / 4, column = 2 * (thread % 4);
    Bias result;
    if constexpr (rows == Rows::keys) {
      result.load(score, q_begin + row, kv_begin + warp_row + column, kv_begin + tile_rows);
    } else {
      result.load(score, q_begin + warp_row + row, kv_begin + column, kv_begin + columns);
    }
    return result;
  }

  /// Reads the biases from 64 rows of queries in shared memory (Rows::keys). They need no transposition.
  __device__ __forceinline__ static void read_bias(Bias& bias, const void* box, int thread) {
    // For 16 queries and a warp's 16 keys: queries 0 to 7 of the first eight keys, then of the other eight keys; then
    // the same for queries 8 to 15.
    const int warp = thread / 32, lane = thread % 32, query = lane % 8 + lane / 16 * 8, piece = 2 * warp + lane / 8 % 2;
    const unsigned first = swizzled(ptx::shared_address(box), query, piece);
#pragma unroll
    for (int group = 0; group < tile_rows / 16; ++group) {
      unsigned tiles[4];
      ptx::ldmatrix_x4_trans(tiles, first + group * 16 * 128);
#pragma unroll
      for (int p = 0; p < 4; ++p) bias.pairs[4 * group + p] = __builtin_bit_cast(typename Bias::Pair, tiles[p]);
    }
  }

  /// The statistics of the queries of registers i and i + 1, if queries are along the columns.
  __device__ __forceinline__ Pair along_columns(const float (&values)[tile_rows], int i) const {
    return *reinterpret_cast<const Pair*>(&values[column + column_of(i)]);
  }

  /// S becomes P as dS needs it: before dropout, divided by the share that dropout keeps (prepare.cuh), and times the
  /// slope of the soft cap and of the program. take(i, p, q) gets the probabilities of registers i and i + 1 as dV
  /// needs them: after dropout, without the slope. lse2(i) gives the statistics of these registers' queries. The caller
  /// has computed the marks under an earlier product.
  template <typename Lse2, typename Take>
  __device__ __forceinline__ void probabilities(Tile& S, const Marks& marks, Lse2 lse2, Take take) const {
    if constexpr (!config.bias_boxes) bias.transpose();
    if (edge) {  // one branch for the tile, not one for each score
      exponentiate_tile<true, true>(S, marks, lse2, take);
    } else if (argument_is_small(S)) {
      exponentiate_tile<false, false, CapArgument::small>(S, marks, lse2, take);
    } else if (Bias::present && bias.some_large()) {
      exponentiate_tile<false, true>(S, marks, lse2, take);
    } else {
      exponentiate_tile<false, false>(S, marks, lse2, take);
    }
  }

  /// Whether this probability belongs to a score of -inf.
  __device__ __forceinline__ static bool is_nothing(float p) {
    return features.score_hides && __builtin_bit_cast(unsigned, p) == 0x80000000u;
  }

  /// dP becomes dS = P * (dP - delta). Dropped scores are marked, or their P is negative.
  enum class Dropped { marked, negative };
  template <Dropped dropped = Dropped::marked, typename Delta>
  __device__ __forceinline__ void gradients(const Tile& S, Tile& dP, Marks marks, Delta delta) const {
    if constexpr (features.dropout && dropped == Dropped::marked) marks.test_again();
    if (edge) {
      differentiate_tile<true, dropped>(S, dP, marks, delta);
    } else {
      differentiate_tile<false, dropped>(S, dP, marks, delta);
    }
  }

  /// probabilities() and gradients() in one pass, if dP is complete when S is. P and dS are returned as operands of the
  /// next products.
  template <typename Lse2, typename Delta>
  __device__ __forceinline__ void operands(Tile& S, Tile& dP, const Marks& marks, Lse2 lse2, Delta delta, Packed& P,
                                           Packed& dS) const {
    if ((tests_argument && !argument_is_small(S)) || edge) {  // large arguments are rare: they take the branch of edges
      operands_of_tile<true>(S, dP, marks, lse2, delta, P, dS);
    } else {
      operands_of_tile<false, tests_argument ? CapArgument::small : CapArgument::any>(S, dP, marks, lse2, delta, P, dS);
    }
  }

  /// A tile as the A operand of the next product: two neighbours to a register.
  __device__ __forceinline__ static void pack(const Tile& values, Packed& packed) {
#pragma unroll
    for (int i = 0; i < count; i += 2) packed[i / 8][i / 2 % 4] = ptx::pack<type>(values[i], values[i + 1]);
  }

 private:
  /// All keys of the tile are in the same block of a list: a bit says whether a query sees them, as far as lists say.
  __device__ __forceinline__ void mark_unlisted(Marks& marks) const {
    static_assert(features.list_bits % columns == 0);
    if (!edge) return;
    ptx::path<"mask/list_map bits read by backward/sm90">();
    const int block = kv_begin / features.list_bits, last_row = score.sight.len_q - 1;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const int shift = ptx::hide_from_compiler(0);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int q = query(i + e) + shift;
        const unsigned word =
            ptx::load_global(score.sight.data.list.row(tile::max(tile::min(q, last_row), 0)) + block / 32);
        const tile::KeyRange range = score.sight.keys_of(q);
        const bool listed = (word >> block % 32 & 1) != 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int k = key(i + 2 * r);
          if (!listed || k < range.begin || k >= range.end) marks.hidden[0] |= 1u << (i + 2 * r + e);
        }
      }
    }
  }

  __device__ __forceinline__ void mark_by_words(Marks& marks, const unsigned* words_of_tile) const {
    constexpr bool has_ranges = features.has_window() || features.chunk || features.seqused_q || features.seqused_kv ||
                                features.key_lengths || features.left_padding;
    if (!edge) return;
    unsigned visible = 0xffffffffu;
    if (words_of_tile != nullptr) visible = words_of_tile[row / 16 * 32 + row % 16 * 4 + column / 2];
    if (has_ranges || words_of_tile == nullptr) {
      const ptx::Vector<unsigned, 2> ranges =
          mask::Votes<features, true>{score.sight, q_begin, kv_begin, row, column}.ranges();
      visible &= ranges[0] | ranges[1] << 2;
    }
    marks.hidden[0] = ~visible;
  }

  /// A Philox block decides on eight scores. If the queries are along the rows, a thread holds all eight. If the keys
  /// are along the rows, it holds those of one key, and the lane of the neighbouring key holds the others. Then the two
  /// lanes share the work: one computes the blocks of the even queries, the other those of the odd queries, and they
  /// exchange the results.
  __device__ __forceinline__ void mark_dropped(Marks& marks) const {
    const int odd = rows == Rows::keys ? row % 2 : 0;
    tile::Dropout dropout = this->dropout;
    if constexpr (rows == Rows::keys) {  // uniform, and so are the Philox keys of all rounds
      dropout.key0 = ptx::shuffle(dropout.key0, 0);
      dropout.key1 = ptx::shuffle(dropout.key1, 0);
    }
    unsigned of_even[words] = {}, of_odd[words] = {};  // Rows::keys: of the blocks' even and odd keys
#pragma unroll
    for (int group = 0; group < count; group += 8) {
      const int shift = ptx::hide_from_compiler(0);
      const tile::DropoutWords random =
          dropout.words(tile::Dropout::row_counter(query(group) + odd + shift), tile::Dropout::column_counter(key(group)));
#pragma unroll
      for (int e = 0; e < (rows == Rows::keys ? 4 : 8); ++e) {
        if constexpr (rows == Rows::keys) {
          // for the even query; word 2 r + c belongs to query + 8 r, key + 8 c
          const int i = group + e / 2 * 4 + e % 2 * 2;
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

  /// Whether no score of the warp exceeds a quarter of the soft cap. There a polynomial computes tanh, and the special
  /// function unit has one exponential a score to compute instead of three.
  enum class CapArgument { any, small };
  static constexpr bool tests_argument = config.loop.tests_cap;
  __device__ __forceinline__ bool argument_is_small(const Tile& S) const {
    if constexpr (!tests_argument) return false;
    return ptx::all(tile::largest_magnitude(S) * ptx::abs(score.scale) <= 0.25f * score.softcap);
  }

  template <bool some_hidden, CapArgument argument = CapArgument::any, typename Lse2, typename Delta>
  __device__ __forceinline__ void operands_of_tile(Tile& S, Tile& dP, const Marks& marks, Lse2 lse2, Delta delta, Packed& P,
                                                   Packed& dS) const {
    exponentiate_tile<some_hidden, argument == CapArgument::any, argument>(S, marks, lse2, [&](int i, float p, float q) {
      P[i / 8][i / 2 % 4] = ptx::pack<type>(p, q);
      differentiate_pair<some_hidden>(S, dP, i, marks, delta(i));
      dS[i / 8][i / 2 % 4] = ptx::pack<type>(dP[i], dP[i + 1]);
    });
  }

  template <bool some_hidden, bool large_bias, CapArgument argument = CapArgument::any, typename Lse2, typename Take>
  __device__ __forceinline__ void exponentiate_tile(Tile& S, const Marks& marks, Lse2 lse2, Take take) const {
#pragma unroll
    for (int group = 0; group < count; group += 4) {
      const int shift = needs_places ? ptx::hide_from_compiler(0) : 0;  // as in mark_hidden()
#pragma unroll
      for (int i = group; i < group + 4; i += 2) {
        const auto statistics = lse2(i);
        const float first = probability_of<some_hidden, large_bias, argument>(S[i], i, shift, marks, statistics[0]);
        take(i, first, probability_of<some_hidden, large_bias, argument>(S[i + 1], i + 1, shift, marks, statistics[1]));
      }
    }
  }

  /// The distance of the query and the key of register i, for ALiBi.
  __device__ __forceinline__ float distance(int i) const {
    constexpr int sign = rows == Rows::keys ? 1 : -1;
    const float first =
        static_cast<float>(q_begin - kv_begin + score.sight.len_kv - score.sight.len_q + sign * (column - row));
    return ptx::abs(first + static_cast<float>(sign * (column_of(i) - 8 * row_of(i))));
  }

  /// What bias and ALiBi add to the score of register i.
  template <bool large_bias>
  __device__ __forceinline__ float added(int i, int q, int k) const {
    if constexpr (!Bias::present) return score.added(q, k);
    const float result = bias.template at<large_bias>(i);
    return features.alibi ? result - score.slope * distance(i) : result;
  }

  /// The exponent of a score with options.
  template <bool large_bias, CapArgument argument>
  __device__ __forceinline__ float exponent_of(float dot, int i, int shift, float lse2, float& slope) const {
    float value = dot, factor = score.scale, rest = 0;  // the score is value * factor + rest
    if constexpr (features.softcap && argument == CapArgument::small) {
      value = tile::SmallTanh(score.scale, score.softcap)(dot), factor = score.softcap;
      if constexpr (!at_score) slope = ptx::fma(-value, value, 1.0f);
    } else if constexpr (features.softcap) {
      const tile::SoftCapped capped(dot, score.scale, score.softcap);
      if constexpr (!at_score) slope = capped.slope();
      value = capped.shortfall, factor = -score.softcap, rest = score.softcap;
    }
    if constexpr (Bias::present && !large_bias && !features.softcap && !features.score_program) {
      rest = ptx::fma(bias.template at<false>(i), tile::log2_e, -lse2);  // large terms cancel first
      if constexpr (features.alibi) rest = ptx::fma(distance(i), -tile::log2_e * score.slope, rest);
      return ptx::fma(dot, tile::log2_e * score.scale, rest);
    }
    if constexpr (reads_scores) {
      // Rows past the last query have no bias. Their lse2 is +inf, so their probabilities are 0.
      const int q = tile::min(query(i) + shift, score.sight.len_q - 1), k = tile::min(key(i), score.sight.len_kv - 1);
      const float capped = features.softcap ? ptx::fma(value, factor, rest) : dot * score.scale;
      const float whole = score.template programmed<true>(capped + added<large_bias>(i, q, k), q, k, slope);
      if (features.score_hides && whole == -tile::infinity) return whole;  // hidden, even if lse2 is NaN
      return ptx::fma(whole, exponent_scale, -lse2);
    }
    const bool has_rest = features.softcap && argument == CapArgument::any;
    rest = has_rest ? ptx::fma(rest, tile::log2_e, -lse2) : -lse2;  // large terms cancel first
    if constexpr (features.alibi) rest = ptx::fma(distance(i), -tile::log2_e * score.slope, rest);
    return ptx::fma(value, tile::log2_e * factor, rest);
  }

  /// Computes one score of probabilities(). Returns the probability after dropout and scaling.
  template <bool some_hidden, bool large_bias, CapArgument argument>
  __device__ __forceinline__ float probability_of(float& S, int i, int shift, const Marks& marks, float lse2) const {
    float slope = 1;
    const float exponent =
        linear ? ptx::fma(S, exponent_scale, -lse2) : exponent_of<large_bias, argument>(S, i, shift, lse2, slope);
    S = ptx::exp2(exponent);
    // A score of -inf is hidden, whatever the key holds. A probability that is merely too small for a float is not
    // hidden.
    [[maybe_unused]] const bool nothing = features.score_hides && exponent == -tile::infinity;
    if constexpr (some_hidden) {
      if (rows == Rows::keys && nonfinite_row[row_of(i)]) S = __builtin_bit_cast(float, 0x7fffffffu);  // NaN
      if (marks.is_hidden(i)) S = 0;
    }
    if constexpr (features.score_hides) S = nothing ? hidden_probability : S;
    float weight = S;
    if constexpr (features.dropout) weight = marks.is_dropped(i) ? 0 : S;
    if constexpr (features.softcap || features.score_program) S = features.score_hides && S == 0 ? S : S * slope;
    return weight;
  }

  template <bool some_hidden, Dropped dropped, typename Delta>
  __device__ __forceinline__ void differentiate_tile(const Tile& S, Tile& dP, const Marks& marks, Delta delta) const {
#pragma unroll
    for (int i = 0; i < count; i += 2) differentiate_pair<some_hidden, dropped>(S, dP, i, marks, delta(i));
  }

  template <bool some_hidden, Dropped dropped = Dropped::marked>
  __device__ __forceinline__ void differentiate_pair(const Tile& S, Tile& dP, int i, const Marks& marks,
                                                     const Pair& delta) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float incoming = dP[i + e];
      float p = S[i + e];
      if constexpr (dropped == Dropped::negative) {
        incoming = __builtin_bit_cast(int, p) < 0 ? 0 : incoming;
        p = ptx::abs(p);
      } else if constexpr (features.dropout) {
        incoming = marks.is_dropped(i + e) ? 0 : incoming;
      }
      dP[i + e] = p * (incoming - delta[e]);
      if (some_hidden && (marks.is_hidden(i + e) || is_nothing(S[i + e]))) dP[i + e] = 0;
    }
  }
};

}  // namespace flash_attention::backward_sm90
