#pragma once

// Forward in bfloat16 where instructions multiply pairs (pairs.h): prefill.h with its two products done by them. Queries
// stay in lanes, so options and masks are the same functions:
//
//     S  = K Q^T                                     K as it lies; Q in pairs of columns
//     P  = 2^(scale * S - origin)                    rounded to bfloat16 in pairs of keys
//     Ot = Ot + V^T P                                V^T packed
//
// A first step packs K (padded) and V (transposed) of every tile of keys, once for all queries. The origin of a row moves
// only when its maximum has outgrown it by 2^8: the results are the same, and Ot is seldom rescaled.
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

struct PackedKeys {
  int columns, columns_v;  // head_dim in multiples of 32, head_dim_v of 16
  Half* K;                 // [block_kv][columns]
  Half* Vt;                // [columns_v][block_kv]
  std::uint8_t* odd;       // [block_kv]
  std::uint8_t* any_odd;

  PackedKeys(const Call& call, std::int64_t batch, int kv_head, std::int64_t tile)
      : columns(round_up(call.head_dim, 32)), columns_v(round_up(call.head_dim_v, 16)) {
    const std::int64_t idx = (batch * call.heads_kv + kv_head) * ceil_div(call.seq_kv, block_kv) + tile;
    K = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[3]) + idx * block_kv * columns;
    Vt = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[4]) + idx * block_kv * columns_v;
    odd = reinterpret_cast<std::uint8_t*>(call.workspace + call.workspace_offsets[5]) + idx * (block_kv + 1);
    any_odd = odd + block_kv;
  }
};

/// Packs one tile of keys. memory: V with its odd rows cleared, [block_kv][columns_v]
inline void pack(const Call& call, std::int64_t item, void* memory) {
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), tile = item % tiles, batch = item / tiles / call.heads_kv;
  const int kv_head = static_cast<int>(item / tiles % call.heads_kv);
  const PackedKeys packed(call, batch, kv_head, tile);
  const KeyTile keys(call, batch, kv_head, tile);
  Half* rows = static_cast<Half*>(memory);
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

/// A tile's scores and probabilities.
struct PairTile {
  alignas(64) float S[block_kv * block_q];
  alignas(64) float P[block_kv / 2 * block_q];  // pairs of keys: [key / 2][lanes]
};

struct Bfloat16Scratch {
  alignas(64) float Q[max_head_dim / 2 * block_q];  // pairs of columns: [head_dim / 2][lanes]
  alignas(64) float Ot[max_head_dim * block_q];
  PairTile tiles[2];  // the one in the softmax, and its neighbour in the products
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
};

/// The products that are done while a tile goes through the softmax, a part after every few keys of it.
template <class Products>
struct Beside {
  PairProduct scores, values;  // of the next tile; of the one before
  int done = 0;

  FLASH_ATTENTION_INLINE void step() {
    const int parts = Products::parts(scores);
    if (done < parts) {
      Products::template multiply_part<Start::zero>(scores, done++);
    } else if (done < parts + Products::parts(values)) {
      Products::template multiply_part<Start::add>(values, done++ - parts);
    }
  }
  void finish() {
    while (done < Products::parts(scores) + Products::parts(values)) step();
  }
};

/// The lanes of `width` vectors, from lane `first` on, in the softmax of a tile.
template <class Products, int width>
struct Strip {
  const float* S;
  float* P;
  int keys, lanes;
  float factor;
  Vec origin[width], largest[width], sum[width];

  void find_largest() {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) largest[v] = splat(-infinity);
    for (int key = 0; key < keys; ++key) {
      FLASH_ATTENTION_UNROLL
      for (int v = 0; v < width; ++v) largest[v] = max(load(S + key * lanes + v * vector_lanes) * factor, largest[v]);
    }
  }

  /// P = 2^(factor * S - origin), its sum, and the largest factor * S.
  void exponentiate(Beside<Products>& beside) {
    constexpr int step = 8;
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) sum[v] = Vec{}, largest[v] = splat(-infinity);
    for (int key = 0; key < keys;) {
      for (const int end = smaller(key + step, keys); key < end; key += 2) {
        FLASH_ATTENTION_UNROLL
        for (int v = 0; v < width; ++v) {
          const float* s = S + key * lanes + v * vector_lanes;
          const Vec even = load(s) * factor, odd = load(s + lanes) * factor;
          const Vec p = exp2(even - origin[v]), q = exp2(odd - origin[v]);
          store(P + key / 2 * lanes + v * vector_lanes, Products::pair(p, q));
          largest[v] = max(odd, max(even, largest[v]));
          sum[v] += p + q;
        }
      }
      beside.step();
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
inline bool softmax_strip(PairTile& tile, int keys, int lanes, int first, float factor, bool is_first,
                          Bfloat16Scratch& scratch, Beside<Products>& beside) {
  constexpr float slack = 8;  // P stays below 2^8
  Statistics& statistics = scratch.statistics;
  Strip<Products, width> strip{tile.S + first, tile.P + first, keys, lanes, factor, {}, {}, {}};
  Vec old[width], row_max[width];
  const auto set_origin = [&] {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) strip.origin[v] = select(row_max[v] == -infinity, Vec{}, row_max[v]);
  };
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) old[v] = row_max[v] = load(statistics.row_max + first + v * vector_lanes);
  set_origin();
  if (is_first) {
    strip.find_largest();
  } else {
    strip.exponentiate(beside);
  }
  Int outgrown{};
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    const Int here = strip.largest[v] > old[v] + slack;
    row_max[v] = select(here, strip.largest[v], old[v]);
    outgrown |= here;
  }
  const bool moved = any_lane(outgrown);
  if (is_first || moved) {
    set_origin();
    strip.exponentiate(beside);
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

/// P = 2^(factor * S - origin), with an origin that moves only when it must: the last one is tried first, and where the
/// maximum has outgrown it the tile is done again. keys is even. True where the origin moved for some lane.
template <class Products>
inline bool softmax_pairs(const RowBlock& block, PairTile& tile, int keys, float factor, bool is_first,
                          Bfloat16Scratch& scratch, Beside<Products>& beside) {
  constexpr int widest = smaller(block_vectors, 4);
  bool moved = false;
  for (int v = 0; v < block.vectors;) {
    const bool wide = block.vectors - v >= widest;
    const auto run = wide ? softmax_strip<Products, widest> : softmax_strip<Products, 1>;
    moved |= run(tile, keys, block.lanes(), v * vector_lanes, factor, is_first, scratch, beside);
    v += wide ? widest : 1;
  }
  return moved;
}

/// The probabilities as float, in the place of the scores.
inline void unpair(int keys, int lanes, PairTile& tile) {
  for (int key = 0; key < keys; key += 2) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      const Uint words = (Uint)load(tile.P + key / 2 * lanes + v);
      store(tile.S + key * lanes + v, (Vec)(words << 16));
      store(tile.S + (key + 1) * lanes + v, (Vec)(words & 0xffff0000u));
    }
  }
}

template <class Products>
inline void drop_some(const Call& call, const RowBlock& block, const Tile& tile, int keys, PairTile& pairs, float* keep) {
  const int lanes = block.lanes();
  unpair(keys, lanes, pairs);
  apply_dropout(call, block, tile, pairs.S, keep);
  for (int key = 0; key < keys; key += 2) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      const float* p = pairs.S + key * lanes + v;
      store(pairs.P + key / 2 * lanes + v, Products::pair(load(p), load(p + lanes)));
    }
  }
}

/// The rows of V that are left out of the product.
inline void add_odd_keys(const Call& call, const RowBlock& block, const Tile& tile, const PackedKeys& packed, int keys,
                         PairTile& pairs, Bfloat16Scratch& scratch) {
  if (*packed.any_odd == 0) return;
  SafeRows odd{};
  for (int key = 0; key < tile.count; ++key) {
    if (packed.odd[key] != 0) odd.odd[odd.num_odd++] = key;
  }
  if (odd.num_odd == 0) return;
  unpair(keys, block.lanes(), pairs);
  odd.original = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  add_odd_rows(odd, pairs.S, {block.lanes(), 1}, block.lanes(), scratch.Ot, {1, block.lanes()}, call.head_dim_v);
}

/// The tile's weights of V, from its scores. True where Ot must be rescaled.
template <class Products>
inline bool probabilities(const Call& call, const RowBlock& block, const Tile& tile, int keys, bool is_first,
                          PairTile& pairs, Bfloat16Scratch& scratch, Beside<Products>& beside) {
  const int lanes = block.lanes();
  float factor = query_factor(call);
  const bool plain = call.softcap == 0 && call.bias.data == nullptr && call.alibi_slopes == nullptr;
  if (!plain || !(factor > 0)) {  // else -inf stays what it is when the softmax multiplies it
    for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(pairs.S + i, load(pairs.S + i) * factor);
    bend_scores(call, block, tile, pairs.S);
    factor = 1;
  }
  hide_scores(call, block, tile, pairs.S);
  for (int i = tile.count * lanes; i < keys * lanes; i += vector_lanes) store(pairs.S + i, splat(-infinity));
  const bool moved = softmax_pairs<Products>(block, pairs, keys, factor, is_first, scratch, beside);
  if (call.dropout) drop_some<Products>(call, block, tile, keys, pairs, scratch.keep);
  return moved;
}

inline void rescale_sums(const Call& call, const RowBlock& block, Bfloat16Scratch& scratch) {
  for (int i = 0; i < call.head_dim_v * block.lanes(); i += block.lanes()) {
    for (int v = 0; v < block.lanes(); v += vector_lanes) {
      store(scratch.Ot + i + v, load(scratch.Ot + i + v) * load(scratch.rescale + v));
    }
  }
}

/// The first tile from `begin` on that some row sees; past the block's keys where there is none.
inline Tile next_tile(const Call& call, const RowBlock& block, std::int64_t begin) {
  for (;; begin += block_kv) {
    const Tile tile(call, block, begin);
    if (tile.seen != Seen::none || begin >= block.key_end) return tile;
  }
}

/// All tiles of a block: while one goes through the softmax, the scores of the next are computed and the values of the one
/// before are summed.
template <class Products>
inline void forward_tiles(const Call& call, const ForwardItem& item, const RowBlock& block, Bfloat16Scratch& scratch) {
  const int lanes = block.lanes();
  const auto packed_at = [&](const Tile& tile) {
    return PackedKeys(call, item.batch, item.kv_head, tile.begin / block_kv);
  };
  const auto scores_of = [&](const Tile& tile, PairTile& pairs) {
    if (tile.begin >= block.key_end) return PairProduct{};
    const PackedKeys packed = packed_at(tile);
    return PairProduct{.A = packed.K,
                       .a_stride = packed.columns,
                       .B = scratch.Q,
                       .b_stride = lanes,
                       .C = pairs.S,
                       .c_stride = lanes,
                       .rows = round_up(tile.count, Products::row_unit),
                       .depth = packed.columns,
                       .lanes = lanes};
  };
  Tile tile = next_tile(call, block, block.key_begin);
  PairProduct values{};
  Beside<Products>{scores_of(tile, scratch.tiles[0]), values}.finish();
  for (int turn = 0; tile.begin < block.key_end; turn = 1 - turn) {
    const Tile next = next_tile(call, block, tile.begin + block_kv);
    PairTile& pairs = scratch.tiles[turn];
    const PackedKeys packed = packed_at(tile);
    const int keys = round_up(tile.count, Products::depth_unit);
    const bool is_first = values.rows == 0;
    Beside<Products> beside{scores_of(next, scratch.tiles[1 - turn]), values};
    const bool moved = probabilities<Products>(call, block, tile, keys, is_first, pairs, scratch, beside);
    beside.finish();
    if (moved) rescale_sums(call, block, scratch);
    add_odd_keys(call, block, tile, packed, keys, pairs, scratch);
    values = {.A = packed.Vt,
              .a_stride = block_kv,
              .B = pairs.P,
              .b_stride = lanes,
              .C = scratch.Ot,
              .c_stride = lanes,
              .rows = packed.columns_v,
              .depth = keys,
              .lanes = lanes};
    tile = next;
  }
  Beside<Products>{{}, values}.finish();
}

template <class Products>
inline void forward_bfloat16(const Call& call, std::int64_t item_idx, void* memory) {
  Bfloat16Scratch& scratch = *static_cast<Bfloat16Scratch*>(memory);
  const ForwardItem item(call, item_idx);
  RowBlock block = item.rows(call);
  if (block.rows == 0) return;
  block.key_begin = block.key_begin / block_kv * block_kv;  // the packed tiles begin there
  take_split(call, item.split, block);

  Products::begin();
  gather_pairs(call, block, call.q, call.head_dim, round_up(call.head_dim, 32), scratch.Q);
  scratch.statistics.reset();
  for (int i = 0; i < round_up(call.head_dim_v, 16) * block.lanes(); ++i) scratch.Ot[i] = 0;
  forward_tiles<Products>(call, item, block, scratch);
  Products::end();

  write_block(call, block, item.split, scratch.statistics, scratch.Ot, scratch.rescale);
}

}  // namespace
}  // namespace flash_attention::cpu
