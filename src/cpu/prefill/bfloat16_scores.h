#pragma once

// A tile of bfloat16.h, from its scores to its weights: S = K Q^T, options and masks, P = 2^(scale * S - origin),
// rounded to bfloat16 in pairs of keys. The origin of a row moves only when its maximum exceeds it by 2^8. The results
// are the same, and the sums of the values are rarely rescaled.

#include "cpu/tile/dropout.h"
#include "cpu/tile/hidden.h"
#include "cpu/tile/pairs.h"
#include "cpu/tile/partial.h"

namespace flash_attention::cpu {
namespace {

/// Rows of bfloat16: rows of K for the products, padded with 0 to a multiple of 32 columns and to as many rows as these
/// read.
struct HalfRows {
  const Half* data;
  std::int64_t stride;
};

/// Memory for one tile of V.
struct ValueTile {
  alignas(64) Half values[block_kv * max_head_dim];
  std::uint8_t
      nonfinite[block_kv];  // set where a row of V holds Inf or NaN: it is 0 in `values`, and added by hidden.h's rule
  bool any_nonfinite;
};

struct Bfloat16Scratch {
  alignas(64) float Q[max_head_dim / 2 * block_q];  // pairs of columns: [head_dim / 2][lanes]
  alignas(64) float O[max_head_dim * block_q];      // sums of values
  alignas(64) float S[block_kv * block_q];
  alignas(64) float P[block_kv / 2 * block_q];  // pairs of keys: [key / 2][lanes]
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  alignas(64) Half K[block_kv * max_head_dim];
  Statistics statistics;
  ValueTile values;
};

/// The softmax of a tile for the lanes of `width` vectors, from lane `first` on.
template <class Products, int width>
struct Strip {
  const float* S;
  float* P;
  int keys, lanes;
  float factor;  // more than 0
  Vec origin[width], largest[width], sum[width];

  FLASH_ATTENTION_INLINE void find_largest() {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) largest[v] = splat(-infinity);
    for (int key = 0; key < keys; ++key) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < width; ++v) largest[v] = max(load(S + key * lanes + v * vector_lanes), largest[v]);
    }
  }

  /// P = 2^(factor * S - origin), its sum, and the largest S.
  FLASH_ATTENTION_INLINE void exponentiate() {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) sum[v] = Vec{}, largest[v] = splat(-infinity);
    for (int key = 0; key < keys; key += 2) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < width; ++v) {
        const float* s = S + key * lanes + v * vector_lanes;
        const Vec even = load(s), odd = load(s + lanes);
        const Vec p = exp2(even * factor - origin[v]), q = exp2(odd * factor - origin[v]);
        store(P + key / 2 * lanes + v * vector_lanes, Products::pair(p, q));
        largest[v] = max(odd, max(even, largest[v]));
        sum[v] += p + q;
      }
    }
  }
};

FLASH_ATTENTION_INLINE bool any_lane(Int where) {
  bool any = false;
  for (int lane = 0; lane < vector_lanes; ++lane) any = any || where[lane] != 0;
  return any;
}

/// softmax_pairs for `width` vectors from lane `first` on.
template <class Products, int width>
inline bool softmax_strip(int keys, int lanes, int first, float factor, Bfloat16Scratch& scratch) {
  constexpr float slack = 8;  // P stays below 2^8
  Statistics& statistics = scratch.statistics;
  Strip<Products, width> strip{scratch.S + first, scratch.P + first, keys, lanes, factor, {}, {}, {}};
  Vec old[width], row_max[width];
  Int started{}, outgrown{};
  const auto set_origin = [&] {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) strip.origin[v] = select(row_max[v] == -infinity, Vec{}, row_max[v]);
  };
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    old[v] = row_max[v] = load(statistics.row_max + first + v * vector_lanes);
    started |= old[v] != -infinity;
  }
  set_origin();
  const bool is_first = !any_lane(started);
  if (is_first) {
    strip.find_largest();
  } else {
    strip.exponentiate();
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    const Vec largest = strip.largest[v] * factor;
    const Int here = largest > old[v] + slack;
    row_max[v] = select(here, largest, old[v]);
    outgrown |= here;
  }
  const bool moved = any_lane(outgrown);
  if (is_first || moved) {
    set_origin();
    strip.exponentiate();
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    const int at = first + v * vector_lanes;
    const Vec scale = exp2(old[v] - strip.origin[v]);
    store(scratch.rescale + at, scale);
    store(statistics.row_max + at, row_max[v]);
    store(statistics.row_sum + at, load(statistics.row_sum + at) * scale + strip.sum[v]);
  }
  return moved;
}

/// P = 2^(factor * S - origin) in pairs, with an origin that moves only if necessary: the last origin is tried first,
/// and if the maximum exceeds it, the tile is computed again. keys is even. Returns true if the origin moved for some
/// lane.
template <class Products>
inline bool softmax_pairs(const RowBlock& block, int keys, float factor, Bfloat16Scratch& scratch) {
  constexpr int widest = smaller(block_vectors, 4);
  bool moved = false;
  for (int v = 0; v < block.vectors;) {
    const bool wide = block.vectors - v >= widest;
    const auto run = wide ? softmax_strip<Products, widest> : softmax_strip<Products, 1>;
    moved |= run(keys, block.lanes(), v * vector_lanes, factor, scratch);
    v += wide ? widest : 1;
  }
  return moved;
}

/// Replaces the scores by the probabilities as float.
inline void unpair(int keys, int lanes, Bfloat16Scratch& scratch) {
  for (int key = 0; key < keys; key += 2) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      const Uint words = (Uint)load(scratch.P + key / 2 * lanes + v);
      store(scratch.S + key * lanes + v, (Vec)(words << 16));
      store(scratch.S + (key + 1) * lanes + v, (Vec)(words & 0xffff0000u));
    }
  }
}

template <class Products>
inline void drop_and_pack(const Call& call, const RowBlock& block, const Tile& tile, int keys, Bfloat16Scratch& scratch) {
  const int lanes = block.lanes();
  unpair(keys, lanes, scratch);
  apply_dropout(call, block, tile, scratch.S, scratch.keep);
  for (int key = 0; key < keys; key += 2) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      const float* p = scratch.S + key * lanes + v;
      store(scratch.P + key / 2 * lanes + v, Products::pair(load(p), load(p + lanes)));
    }
  }
}

/// Computes the tile's weights of V, as pairs in P. Returns true if an origin moved: then sums over earlier tiles must
/// be multiplied by scratch.rescale. keys: those of the tile, in units of the products.
template <class Products>
inline bool probabilities(const Call& call, const RowBlock& block, const Tile& tile, HalfRows K, int keys,
                          Bfloat16Scratch& scratch) {
  const int lanes = block.lanes();
  Products::template multiply<Start::zero>({.A = K.data,
                                            .a_stride = K.stride,
                                            .B = scratch.Q,
                                            .b_stride = lanes,
                                            .C = scratch.S,
                                            .c_stride = lanes,
                                            .rows = round_up(tile.count, Products::row_unit),
                                            .depth = round_up(call.head_dim, 32),
                                            .lanes = lanes});
  float factor = query_factor(call);
  const bool plain = call.softcap == 0 && call.bias.data == nullptr && call.alibi_slopes == nullptr;
  if (plain && factor > 0 && !call.has_score_program()) {
    hide_scores(block, tile, scratch.S);  // -inf stays -inf when the softmax multiplies it
  } else {
    for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(scratch.S + i, load(scratch.S + i) * factor);
    finish_scores(call, block, tile, scratch.S);
    factor = 1;
  }
  for (int i = tile.count * lanes; i < keys * lanes; i += vector_lanes) store(scratch.S + i, splat(-infinity));
  const bool moved = softmax_pairs<Products>(block, keys, factor, scratch);
  if (call.dropout) drop_and_pack<Products>(call, block, tile, keys, scratch);
  return moved;
}

/// Adds the rows of V that were left out of the product. sum: the strides of O from row to row and from column to
/// column.
inline void add_nonfinite_keys(const Call& call, const RowBlock& block, const Tile& tile,
                               const std::uint8_t* nonfinite_keys, int keys, Strided sum, Bfloat16Scratch& scratch) {
  SafeRows cleared{};
  for (int key = 0; key < tile.count; ++key) {
    if (nonfinite_keys[key] != 0) cleared.nonfinite[cleared.num_nonfinite++] = key;
  }
  if (cleared.num_nonfinite == 0) return;
  unpair(keys, block.lanes(), scratch);
  cleared.original = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  add_nonfinite_rows(cleared, scratch.S, {block.lanes(), 1}, block.lanes(), scratch.O, sum, call.head_dim_v);
}

}  // namespace
}  // namespace flash_attention::cpu
