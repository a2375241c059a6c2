#pragma once

#include "tile/bounded.cuh"
#include "tile/program.cuh"
#include "tile/scales.cuh"
#include "tile/sequence.cuh"
#include "tile/tile_map.cuh"

// From the dot product of a query and a key to the score, and which scores exist: docs/numerics.md in code. A feature that
// is off leaves nothing behind.

namespace flash_attention::tile {

/// A range of tiles, the last one excluded.
struct TileRange {
  int begin;
  int end;
};

/// A range of keys, the last one excluded; empty where end <= begin.
struct KeyRange {
  int begin;
  int end;
};

/// The scores of one sequence and head.
template <Features features>
struct Score {
  /// Without soft cap, bias and ALiBi a score is the dot product times a constant, which softmax folds into its exponent.
  static constexpr bool linear = !(features.softcap || features.bias || features.alibi || features.score_program);
  /// True where keys may be hidden from some queries and not from others.
  static constexpr bool hides = features.window_left || features.window_right || features.mask || features.left_padding ||
                                features.score_hides || MaskData<features>::present;
  /// True where tiles may be hidden that are in the range of their rows.
  static constexpr bool skips_tiles = TileMap<features>::present;
  using Bias = ptx::Element<features.bias_dtype>;
  using ProgramRow = typename Program<features.score_program>::Row;
  using ProgramKey = typename Program<features.score_program>::Key;

  int len_q;
  int len_kv;
  int visible_kv;
  int first_kv;
  int diagonal;  // the key on the diagonal of query 0
  int window_left;
  int window_right;
  int chunk;
  float scale;
  float softcap;
  float slope;
  const Bias* bias;
  long long bias_stride;
  const unsigned char* mask;
  long long mask_stride;
  MaskData<features> data;  // hidden rows, blocks and a mask program
  TileMap<features> map;    // what they say of tiles
  Program<features.score_program> program;

  __device__ __forceinline__ Score(const AttentionArgs& args, const Sequence& sequence, int head_idx)
      : len_q(sequence.len_q),
        len_kv(sequence.len_kv),
        visible_kv(sequence.visible_kv),
        first_kv(sequence.first_kv),
        diagonal(features.top_left ? 0 : sequence.len_kv - sequence.len_q),
        window_left(args.window_left),
        window_right(args.window_right),
        scale(args.scale),
        data(args, sequence, head_idx),
        map(args, sequence, head_idx),
        program(args, sequence.batch_idx, head_idx) {
    if constexpr (features.kv_scales && !features.latent)  // latent keys have two scales each
      scale *= head_scale<features>(args.K_scale, sequence.batch_idx, head_idx / args.group);
    if constexpr (features.q_scales) scale *= scale_of_head(args.Q_scale, sequence.batch_idx, head_idx / args.group);
    if constexpr (features.chunk) chunk = args.chunk;
    if constexpr (features.softcap) softcap = args.softcap;
    if constexpr (features.alibi) slope = args.alibi_slopes[sequence.batch_idx * args.alibi_batch_stride + head_idx];
    if constexpr (features.bias) {
      bias = static_cast<const Bias*>(args.bias.data) + sequence.batch_idx * args.bias.batch_stride +
             head_idx * args.bias.head_stride;
      bias_stride = args.bias.q_stride;
    }
    if constexpr (features.mask) {
      mask = static_cast<const unsigned char*>(args.mask.data) + sequence.batch_idx * args.mask.batch_stride +
             head_idx * args.mask.head_stride;
      mask_stride = args.mask.q_stride;
    }
  }

  /// The edges of query i's window, the second excluded. Both grow with i.
  __device__ __forceinline__ int window_begin(int i) const {
    const int begin = i + diagonal - window_left;
    return features.chunk ? max(begin, chunk_begin(i + diagonal)) : begin;
  }
  __device__ __forceinline__ int window_end(int i) const {
    const int end = i + diagonal + window_right + 1;
    return features.chunk ? min(end, chunk_begin(i + diagonal) + chunk) : end;
  }
  __device__ __forceinline__ int chunk_begin(int position) const {
    return abi::chunk_begin(position, features.left_padding ? first_kv : 0, chunk);
  }

  /// The keys that query i may see, but for the mask tensor; none outside of the sequence.
  __device__ __forceinline__ KeyRange keys_of(int i) const {
    KeyRange range{0, i < len_q ? visible_kv : 0};
    if constexpr (features.left_padding) range.begin = first_kv;
    if constexpr (features.window_left) range.begin = max(range.begin, window_begin(i));
    if constexpr (features.window_right) range.end = min(range.end, window_end(i));
    return range;
  }

  /// The keys that some of the queries [q_begin, q_end) may see; those that all of them see, but for queries that are not
  /// in use. Both bounds of a range grow with the query.
  __device__ __forceinline__ KeyRange keys_of_any(int q_begin, int q_end) const {
    if (q_begin >= len_q) return {0, 0};
    return {keys_of(q_begin).begin, keys_of(min(q_end, len_q) - 1).end};
  }
  __device__ __forceinline__ KeyRange keys_of_all(int q_begin, int q_end) const {
    if (features.mask || MaskData<features>::present || q_begin >= len_q) return {0, 0};
    return {keys_of(min(q_end, len_q) - 1).begin, keys_of(q_begin).end};
  }

  /// Whether query i sees key j of its range.
  __device__ __forceinline__ bool visible(const KeyRange& range, int i, int j) const {
    bool result = j < range.end;
    if constexpr (features.window_left || features.left_padding) result = result && j >= range.begin;
    if constexpr (features.mask) result = result && mask[i * mask_stride + j] != 0;
    if constexpr (MaskData<features>::present) result = result && !data.hides_pair(i, j);
    return result;
  }

  /// Whether query i sees key j; false outside of the sequence.
  __device__ __forceinline__ bool visible(int i, int j) const { return visible(keys_of(i), i, j); }

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

  /// What bias and ALiBi add to a score. Only for i and j inside of the sequence.
  __device__ __forceinline__ float added(int i, int j) const {
    float result = 0;
    if constexpr (features.bias) result = bounded_bias<features.bias_dtype>(bias[i * bias_stride + j]);
    if constexpr (features.alibi) {
      const int distance = i + len_kv - len_q - j;
      result -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return result;
  }

  /// What the program makes of a score. Only for i and j inside of the sequence.
  __device__ __forceinline__ float programmed(float score, int i, int j) const {
    return programmed(score, program.row(i), program.key(j));
  }
  __device__ __forceinline__ float programmed(float score, const ProgramRow& row, const ProgramKey& key) const {
    if constexpr (features.score_program) return bounded(program.score(score, row, key));
    return score;
  }
  /// The same; slope is multiplied by the derivative. beside_lse: the bounded lse comes off it, which makes 0 of what is
  /// far below, bounded or not.
  template <bool beside_lse = false>
  __device__ __forceinline__ float programmed(float score, int i, int j, float& slope) const {
    if constexpr (!features.score_program) return score;
    if constexpr (features.score_program) score = program.score(score, program.row(i), program.key(j), slope);
    return beside_lse && may_be_huge ? ptx::min_or_nan(score, largest_score) : bounded(score);
  }
  static constexpr bool may_be_huge = features.score_program && Program<features.score_program>::largest > largest_score;
  __device__ __forceinline__ static float bounded(float score) {
    return may_be_huge ? bounded_bias<Type::float32>(score) : score;
  }
  /// The score of a dot product.
  __device__ __forceinline__ float full(float dot, int i, int j) const {
    return programmed(capped(dot) + added(i, j), i, j);
  }

  /// The score in units of unit_scale(): the dot product itself where the score is linear in it.
  __device__ __forceinline__ float in_units(float dot, int i, int j) const {
    if constexpr (linear) return dot;
    return full(dot, i, j);
  }
  __device__ __forceinline__ float unit_scale() const { return linear ? scale : 1.0f; }

  /// The tiles of block_kv keys of which the queries [q_begin, q_begin + block_q) see something.
  template <int block_q, int block_kv>
  __device__ __forceinline__ TileRange key_tiles(int q_begin) const {
    const int q_last = min(q_begin + block_q, len_q) - 1;
    int begin = features.left_padding ? first_kv : 0;
    int end = q_begin < len_q ? visible_kv : 0;
    if constexpr (features.window_left) begin = max(begin, window_begin(q_begin));
    if constexpr (features.window_right) end = min(end, window_end(q_last));
    if (begin >= end) return {0, 0};
    return {begin / block_kv, ceil_div(end, block_kv)};
  }

  /// The tiles of block_q queries that see something of the keys [kv_begin, kv_begin + block_kv).
  template <int block_q, int block_kv>
  __device__ __forceinline__ TileRange query_tiles(int kv_begin) const {
    const int kv_last = min(kv_begin + block_kv, visible_kv) - 1;
    int begin = 0;
    int end = kv_begin < visible_kv ? len_q : 0;
    if constexpr (features.window_right) begin = max(begin, kv_begin - diagonal - window_right);
    if constexpr (features.window_left) end = min(end, kv_last - diagonal + window_left + 1);
    if constexpr (features.chunk) {
      begin = max(begin, chunk_begin(kv_begin) - diagonal);
      end = min(end, chunk_begin(kv_last) + chunk - diagonal);
    }
    if (begin >= end) return {0, 0};
    return {begin / block_q, ceil_div(end, block_q)};
  }

  /// True where no query of the tile sees a key of the tile, whatever the mask tensor says.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool none_visible(int q_begin, int kv_begin) const {
    bool result = kv_begin >= visible_kv || q_begin >= len_q;
    if constexpr (features.left_padding) result = result || kv_begin + block_kv <= first_kv;
    if constexpr (features.window_left) result = result || kv_begin + block_kv - 1 < window_begin(q_begin);
    if constexpr (features.window_right) result = result || kv_begin > window_end(q_begin + block_q - 1) - 1;
    return result;
  }

  /// True where hidden rows, blocks or a mask program hide all of the tile: it need not be looked at.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool masks_hide(int q_begin, int kv_begin) const {
    return map.template of<block_q, block_kv>(q_begin, kv_begin) == TileClass::none;
  }

  /// True where every query of the tile that exists sees every key of the tile: no score of it needs a mask.
  template <int block_q, int block_kv>
  __device__ __forceinline__ bool all_visible(int q_begin, int kv_begin) const {
    if constexpr ((features.mask && !features.mask_map) || features.score_hides) return false;
    const int q_last = min(q_begin + block_q, len_q) - 1;
    bool result = kv_begin + block_kv <= visible_kv;
    if constexpr (features.left_padding) result = result && kv_begin >= first_kv;
    result = result && map.template of<block_q, block_kv>(q_begin, kv_begin) == TileClass::full;
    if constexpr (features.window_left) result = result && kv_begin >= window_begin(q_last);
    if constexpr (features.window_right) result = result && kv_begin + block_kv - 1 <= window_end(q_begin) - 1;
    return result;
  }
};

}  // namespace flash_attention::tile
