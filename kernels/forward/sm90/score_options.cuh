#pragma once

// From dot products to scores, of a tile in registers: soft cap, bias, ALiBi and program, and the mask of edge blocks.

#include "forward/sm90/added.cuh"
#include "forward/sm90/tile_scheduler.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"
#include "tile/bias_pairs.cuh"
#include "tile/dropout.cuh"
#include "tile/key_source.cuh"

namespace flash_attention::forward_sm90 {

/// The rows of one thread: rows `row` and `row + 8` of the tile, and in each group of 8 keys the two from `column` on. S[i]
/// is row (i / 2) % 2, key 8 (i / 4) + column + i % 2 (ptx/wgmma.cuh).
template <ForwardConfig config>
struct ScoreOptions {
  using Shape = forward_sm90::Shape<config>;
  static constexpr Features features = config.features;
  static constexpr int block_kv = Shape::score_keys;
  static constexpr int count = block_kv / 2;
  // Wide heads have no registers for biases that are loaded ahead.
  static constexpr bool loads_bias = features.bias && !Shape::wide;
  using Added = forward_sm90::Added<features, features.bias && !loads_bias>;
  using Tile = float[count];
  using Packed = unsigned[block_kv / 16][4];
  using ProgramRow = typename tile::Score<features>::ProgramRow;
  using ProgramKey = typename tile::Score<features>::ProgramKey;

  tile::Score<features> score;
  mutable tile::BiasPairs<features, loads_bias ? count : 0> bias;  // of the block whose scores come next
  mutable unsigned bias_smem;                                      // of this lane's row, where they are in shared memory
  float exponent_scale;                                            // softmax is 2^(exponent_scale (s - maximum))
  int row;
  int column;

  __device__ __forceinline__ ScoreOptions(const AttentionArgs& args, const forward_sm90::Tile& tile, int first_row,
                                          int lane)
      : score(args, tile.sequence, tile.head_idx),
        exponent_scale(score.unit_scale() * tile::log2_e),
        row(first_row + lane / 4),
        column(2 * (lane % 4)) {}

  /// Starts to load the biases of a block: before its scores are ready, after those of the block before were made.
  __device__ __forceinline__ void load_bias(int kv_begin) const {
    if constexpr (features.bias && Shape::bias_stages == 0)
      bias.load(score, ptx::registers_fresh(row), kv_begin + column, kv_begin + block_kv);
  }
  /// Starts to bring those of a later block to L2: a warp has 16 rows.
  __device__ __forceinline__ void prefetch_bias(int kv_begin) const {
    if constexpr (features.bias && Shape::bias_stages == 0) {
      const int own = ptx::registers_fresh(row), lane = 4 * (own % 8) + column / 2;
      bias.template prefetch<16, block_kv>(score, own / 16 * 16, kv_begin, lane);
    }
  }

  /// The biases of S[i] to S[i + 7], by a whole warp: of 16 keys.
  __device__ __forceinline__ void read_biases(int i, unsigned (&pairs)[4]) const {
    constexpr int bytes_of_chunk = wg_rows * Shape::bias_keys * 2, step = i_of_chunk;
    ptx::ldmatrix_x4(pairs, (bias_smem ^ i % step * 4) + i / step * bytes_of_chunk);
  }
  static constexpr int i_of_chunk = Shape::bias_keys / 2;
  /// All of the block to registers.
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

  /// tile::Score::in_units, with a soft cap of two instructions of the special function unit: tanh(x) is
  /// 1 - 2 / (1 + e^2x), with an error of 3e-7. Near 0, where lse may be no larger than that times the cap, it is a
  /// polynomial; not inside of the edges, where scores that are all small do not come here.
  template <bool interior = false>
  __device__ __forceinline__ float in_units(float dot, float added) const {
    if constexpr (features.softcap) {
      const float x = dot * (score.scale / score.softcap), square = x * x;
      const float exponential =
          ptx::exp2(interior ? dot * (2.0f * tile::log2_e * score.scale / score.softcap) : x * (2.0f * tile::log2_e));
      float tanh = ptx::fma(-2.0f, ptx::reciprocal(1.0f + exponential), 1.0f);
      if (!interior && square < 0.01f) tanh = x * ptx::fma(square, ptx::fma(square, 2.0f / 15, -1.0f / 3), 1.0f);
      return ptx::fma(score.softcap, tanh, added);
    }
    return ptx::fma(dot, score.scale, added);
  }

  /// Soft cap, bias and ALiBi where no score needs a test. Rows past the last query repeat it: bias has no row for them.
  template <bool interior = false>
  __device__ __forceinline__ void modify(Tile& S, int kv_begin) const {
    if constexpr (!tile::Score<features>::linear) {
      const int first_row = ptx::registers_fresh(row);  // nothing of this is worked out before the scores are ready
      const Added added[2] = {added_to(first_row, kv_begin), added_to(first_row + 8, kv_begin)};
      if constexpr (features.score_program) return modify_by_program<interior>(S, first_row, kv_begin, added);
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

  /// What the program knows of a row. A key is seen by both rows of a thread.
  __device__ __forceinline__ ProgramRow program_row(int q) const {
    return score.program.row(tile::min(q, score.len_q - 1));
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
  /// Score::programmed in a block that keeps its rows' references, which are bounded. What is larger overflows next to
  /// them, and the tile is done again with a running maximum; what is far below must not be so next to a reference that is,
  /// too.
  __device__ __forceinline__ float programmed_inside(float s, const ProgramRow& row, const ProgramKey& key) const {
    if constexpr (!features.score_program) {
      return s;
    } else if constexpr (features.score_hides || !tile::Score<features>::may_be_huge) {
      return score.programmed(s, row, key);
    } else {
      return ptx::max_or_nan(score.program.score(s, row, key), -tile::largest_score);
    }
  }
  /// What the program makes of S[i].
  __device__ __forceinline__ float programmed(float s, const ProgramRow& of_row, int kv_begin, int i) const {
    return score.programmed(s, of_row, score.program.key(kv_begin + column, key_of(i)));
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
      if constexpr (features.window_left) first = score.window_begin(q);
      if constexpr (features.left_padding) first = features.window_left ? tile::max(first, score.first_kv) : score.first_kv;
      if constexpr (features.window_right) last = tile::min(last, score.window_end(q));
      if (q >= score.len_q) last = 0;
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
        visible = visible && score.mask[(row + 8 * r) * score.mask_stride + kv_begin + column + key_of(i)] != 0;
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

  /// Whether the probability of this query and key reaches the output. For the rare cases that ask key by key.
  __device__ __forceinline__ bool reaches_output(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                                 int key) const {
    bool result = score.visible(q, key);
    if constexpr (features.made_words) result = result && is_in_words(args, tile, q, key);
    if constexpr (features.score_program) result = result && score_of(args, tile, q, key) != -tile::infinity;
    if constexpr (features.dropout)
      result = result && tile::Dropout(args, tile.sequence.batch_idx, tile.head_idx).keeps(q, key);
    return result;
  }

  /// Whether the masks show a pair, by the words that were made before: a tile that they show completely has none.
  __device__ __forceinline__ bool is_in_words(const AttentionArgs& args, const forward_sm90::Tile& tile, int q,
                                              int key) const {
    if (score.map.template of<mask_unit, mask_unit>(q / mask_unit * mask_unit, key / mask_unit * mask_unit) ==
        TileClass::full)
      return true;
    constexpr int keys = Shape::block_kv / 32;  // of a bit's lane
    const auto* const row =
        mask::made_words<Shape::block_q, Shape::block_kv>(args, tile.list.row_tile, key / Shape::block_kv) +
        q % Shape::block_q;
    const int inside = key % Shape::block_kv;
    return ((*row)[inside % keys] >> inside / keys & 1) != 0;
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
};

}  // namespace flash_attention::forward_sm90
