#pragma once

// Forward in bfloat16 where instructions multiply pairs (pairs.h): prefill.h with its two products done by them. Queries
// stay in lanes, so options and masks are the same functions:
//
//     S  = K Q^T                                     K as it lies; Q in pairs of columns
//     P  = 2^(scale * S - origin)                    rounded to bfloat16 in pairs of keys
//     Ot = Ot + V^T P                                V^T packed
//
// A first step packs K (padded) and V (transposed) of every tile of keys, once for all blocks of queries. The origin of a
// row moves only when its maximum has outgrown it by 2^8: the results are the same, and Ot is seldom rescaled.
//
// workspace_offsets[3]: K [batch][kv head][tile][block_kv][columns]; [4]: V^T [batch][kv head][tile][columns_v][block_kv];
// [5]: [batch][kv head][tile][block_kv + 1], a byte for each key, set where V holds Inf or NaN, and one for the tile. Such
// a row is packed as 0 and added by hidden.h's rule.

#include "cpu/generic/dropout.h"
#include "cpu/generic/hidden.h"
#include "cpu/generic/pairs.h"
#include "cpu/generic/partial.h"

namespace flash_attention::cpu {
namespace {

/// One packed tile of a thread's own.
struct OwnTile {
  alignas(64) Half K[block_kv * max_head_dim];
  alignas(64) Half Vt[block_kv * max_head_dim];
  std::uint8_t odd[block_kv + 1];
};

/// A single block of rows packs each tile itself, when it comes to it.
inline bool packs_ahead(const Call& call) { return blocks_per_head(call) > 1; }

struct PackedKeys {
  int columns, columns_v;  // head_dim in multiples of 32, head_dim_v of 16
  Half* K;                 // [block_kv][columns]
  Half* Vt;                // [columns_v][block_kv]
  std::uint8_t* odd;       // [block_kv]
  std::uint8_t* any_odd;

  /// In the workspace.
  PackedKeys(const Call& call, std::int64_t batch, int kv_head, std::int64_t tile)
      : columns(round_up(call.head_dim, 32)), columns_v(round_up(call.head_dim_v, 16)) {
    const std::int64_t idx = (batch * call.heads_kv + kv_head) * ceil_div(call.seq_kv, block_kv) + tile;
    K = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[3]) + idx * block_kv * columns;
    Vt = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[4]) + idx * block_kv * columns_v;
    odd = reinterpret_cast<std::uint8_t*>(call.workspace + call.workspace_offsets[5]) + idx * (block_kv + 1);
    any_odd = odd + block_kv;
  }
  PackedKeys(const Call& call, OwnTile& own)
      : columns(round_up(call.head_dim, 32)),
        columns_v(round_up(call.head_dim_v, 16)),
        K(own.K),
        Vt(own.Vt),
        odd(own.odd),
        any_odd(own.odd + block_kv) {}
};

/// Packs one tile of keys. rows: memory for V with its odd rows cleared, [block_kv][columns_v]
inline void pack_tile(const Call& call, const KeyTile& keys, const PackedKeys& packed, Half* rows) {
  LargestBits of_k, of_v;
  for (int key = 0; key < keys.padded; ++key) {
    const bool there = key < keys.count;
    packed.odd[key] = 0;
    copy_halves(keys.row(call.k, key), there ? call.head_dim : 0, packed.K + key * packed.columns, packed.columns, of_k);
    copy_halves(keys.row(call.v, key), there ? call.head_dim_v : 0, rows + key * packed.columns_v, packed.columns_v, of_v);
  }
  *packed.any_odd = !of_v.all_finite();
  for (int key = 0; *packed.any_odd && key < keys.count; ++key) {
    LargestBits of_row;
    copy_halves(keys.row(call.v, key), call.head_dim_v, rows + key * packed.columns_v, packed.columns_v, of_row);
    packed.odd[key] = !of_row.all_finite();
    if (packed.odd[key] != 0) copy_halves(rows, 0, rows + key * packed.columns_v, packed.columns_v, of_row);
  }
  transpose_halves(rows, packed.columns_v, keys.padded, packed.columns_v, packed.Vt, block_kv);
}

inline std::int64_t pack_ahead_items(const Call& call) { return packs_ahead(call) ? pack_items(call) : 0; }

inline void pack_ahead(const Call& call, std::int64_t item, void* memory) {
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), tile = item % tiles, batch = item / tiles / call.heads_kv;
  const int kv_head = static_cast<int>(item / tiles % call.heads_kv);
  pack_tile(call, KeyTile(call, batch, kv_head, tile), PackedKeys(call, batch, kv_head, tile), static_cast<Half*>(memory));
}

struct Bfloat16Scratch {
  alignas(64) float Q[max_head_dim / 2 * block_q];  // pairs of columns: [head_dim / 2][lanes]
  alignas(64) float Ot[max_head_dim * block_q];
  alignas(64) float S[block_kv * block_q];
  alignas(64) float P[block_kv / 2 * block_q];  // pairs of keys: [key / 2][lanes]
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
  OwnTile own;
};

/// The lanes of `width` vectors, from lane `first` on, in the softmax of a tile.
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

/// P = 2^(factor * S - origin) in pairs, with an origin that moves only when it must: the last one is tried first, and
/// where the maximum has outgrown it the tile is done again. keys is even. True where the origin moved for some lane.
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

/// The probabilities as float, in the place of the scores.
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
inline void drop_some(const Call& call, const RowBlock& block, const Tile& tile, int keys, Bfloat16Scratch& scratch) {
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

/// The rows of V that were left out of the product.
inline void add_odd_keys(const Call& call, const RowBlock& block, const Tile& tile, const PackedKeys& packed, int keys,
                         Bfloat16Scratch& scratch) {
  if (*packed.any_odd == 0) return;
  SafeRows odd{};
  for (int key = 0; key < tile.count; ++key) {
    if (packed.odd[key] != 0) odd.odd[odd.num_odd++] = key;
  }
  if (odd.num_odd == 0) return;
  unpair(keys, block.lanes(), scratch);
  odd.original = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  add_odd_rows(odd, scratch.S, {block.lanes(), 1}, block.lanes(), scratch.Ot, {1, block.lanes()}, call.head_dim_v);
}

/// The tile's weights of V, as pairs in P. Where an origin moved, Ot follows.
template <class Products>
inline void probabilities(const Call& call, const RowBlock& block, const Tile& tile, const PackedKeys& packed, int keys,
                          Bfloat16Scratch& scratch) {
  const int lanes = block.lanes();
  Products::template multiply<Start::zero>({.A = packed.K,
                                            .a_stride = packed.columns,
                                            .B = scratch.Q,
                                            .b_stride = lanes,
                                            .C = scratch.S,
                                            .c_stride = lanes,
                                            .rows = round_up(tile.count, Products::row_unit),
                                            .depth = packed.columns,
                                            .lanes = lanes});
  float factor = query_factor(call);
  const bool plain = call.softcap == 0 && call.bias.data == nullptr && call.alibi_slopes == nullptr;
  if (!plain || !(factor > 0)) {  // else -inf stays what it is when the softmax multiplies it
    for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(scratch.S + i, load(scratch.S + i) * factor);
    bend_scores(call, block, tile, scratch.S);
    factor = 1;
  }
  hide_scores(call, block, tile, scratch.S);
  for (int i = tile.count * lanes; i < keys * lanes; i += vector_lanes) store(scratch.S + i, splat(-infinity));
  const bool moved = softmax_pairs<Products>(block, keys, factor, scratch);
  if (call.dropout) drop_some<Products>(call, block, tile, keys, scratch);
  if (!moved) return;
  for (int i = 0; i < call.head_dim_v * lanes; i += lanes) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      store(scratch.Ot + i + v, load(scratch.Ot + i + v) * load(scratch.rescale + v));
    }
  }
}

template <class Products>
inline void forward_bfloat16(const Call& call, std::int64_t item_idx, void* memory) {
  Bfloat16Scratch& scratch = *static_cast<Bfloat16Scratch*>(memory);
  const ForwardItem item(call, item_idx);
  RowBlock block = item.rows(call);
  if (block.rows == 0) return;
  block.key_begin = block.key_begin / block_kv * block_kv;  // the packed tiles begin there
  take_split(call, item.split, block_kv, block);

  Products::begin();
  gather_pairs(call, block, call.q, call.head_dim, round_up(call.head_dim, 32), scratch.Q);
  scratch.statistics.reset();
  for (int i = 0; i < round_up(call.head_dim_v, 16) * block.lanes(); ++i) scratch.Ot[i] = 0;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const std::int64_t tile_idx = begin / block_kv;
    const PackedKeys packed =
        packs_ahead(call) ? PackedKeys(call, item.batch, item.kv_head, tile_idx) : PackedKeys(call, scratch.own);
    if (!packs_ahead(call)) {
      pack_tile(call, KeyTile(call, item.batch, item.kv_head, tile_idx), packed, reinterpret_cast<Half*>(scratch.V));
      const std::int64_t next = begin + block_kv, end = smaller(next + block_kv, block.key_end);
      ask_for_rows(call, block, call.k, call.head_dim, next, end);
      ask_for_rows(call, block, call.v, call.head_dim_v, next, end);
    }
    const int keys = round_up(tile.count, Products::depth_unit);
    probabilities<Products>(call, block, tile, packed, keys, scratch);
    Products::template multiply<Start::add>({.A = packed.Vt,
                                             .a_stride = block_kv,
                                             .B = scratch.P,
                                             .b_stride = block.lanes(),
                                             .C = scratch.Ot,
                                             .c_stride = block.lanes(),
                                             .rows = packed.columns_v,
                                             .depth = keys,
                                             .lanes = block.lanes()});
    add_odd_keys(call, block, tile, packed, keys, scratch);
  }
  Products::end();

  write_block(call, block, item.split, scratch.statistics, scratch.Ot, scratch.rescale);
}

}  // namespace
}  // namespace flash_attention::cpu
