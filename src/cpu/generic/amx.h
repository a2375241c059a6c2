#pragma once

// Forward on AMX, bfloat16: prefill.h with its two products on tile registers. Queries stay in lanes, so options and masks
// are the same functions:
//
//     S  = K Q^T    K as it lies, 16 keys x 32 columns a tile; Q in pairs of columns      [128][64]
//     P  = 2^(scale * S - origin), rounded to bfloat16 in pairs of keys
//     Ot = Ot + V^T P    V^T packed, 16 columns x 32 keys a tile                          [head_dim_v][64]
//
// A first step packs K (padded to whole tiles) and V (transposed) of every tile of keys, once for all queries. Tiles cannot
// be multiplied by a row's factor, so the origin of a row moves only when its maximum has outgrown it by 2^8: the results
// are the same, and Ot is seldom rescaled.
//
// workspace_offsets[0]: K [batch][kv head][tile][128][columns]; [1]: V^T [batch][kv head][tile][columns_v][128];
// [2]: a byte for each key [batch][kv head][tile][128], set where V holds Inf or NaN. Such a row is packed as 0 and added
// by hidden.h's rule.

#include "cpu/generic/dropout.h"
#include "cpu/generic/hidden.h"
#include "cpu/generic/partial.h"

namespace flash_attention::cpu {
namespace {

using Half = std::uint16_t;

struct Packed {
  int columns, columns_v;  // head_dim in whole tiles of 32, head_dim_v of 16
  Half* K;                 // [block_kv][columns]
  Half* Vt;                // [columns_v][block_kv]
  std::uint8_t* odd;       // [block_kv]

  Packed(const Call& call, std::int64_t batch, int kv_head, std::int64_t tile)
      : columns(round_up(call.head_dim, 32)), columns_v(round_up(call.head_dim_v, 16)) {
    const std::int64_t idx = (batch * call.heads_kv + kv_head) * ceil_div(call.seq_kv, block_kv) + tile;
    K = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[0]) + idx * block_kv * columns;
    Vt = reinterpret_cast<Half*>(call.workspace + call.workspace_offsets[1]) + idx * block_kv * columns_v;
    odd = reinterpret_cast<std::uint8_t*>(call.workspace + call.workspace_offsets[2]) + idx * block_kv;
  }
};

inline std::int64_t pack_items(const Call& call) { return call.batch * call.heads_kv * ceil_div(call.seq_kv, block_kv); }

inline bool is_finite(const Half* row, int columns) {
  bool finite = true;
  for (int c = 0; c < columns; ++c) finite = finite && (row[c] & 0x7f80) != 0x7f80;
  return finite;
}

/// Packs one tile of keys.
inline void pack(const Call& call, std::int64_t item, void* memory) {
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), tile = item % tiles, batch = item / tiles / call.heads_kv;
  const int kv_head = static_cast<int>(item / tiles % call.heads_kv);
  const Packed packed(call, batch, kv_head, tile);
  const Sequence sequence(call, batch);
  const auto row_of = [&](const TensorView& tensor, int key) {
    return reinterpret_cast<const Half*>(tensor.data) + batch * tensor.batch_stride +
           (sequence.kv_begin + tile * block_kv + key) * tensor.seq_stride + kv_head * tensor.head_stride;
  };
  const int keys =
      static_cast<int>(larger<std::int64_t>(smaller<std::int64_t>(block_kv, sequence.kv_used - tile * block_kv), 0));
  Half* rows = static_cast<Half*>(memory);  // V with its odd rows cleared: [block_kv][columns_v]
  for (int key = 0; key < block_kv; ++key) {
    const bool there = key < keys;
    for (int c = 0; c < packed.columns; ++c) {
      packed.K[key * packed.columns + c] = there && c < call.head_dim ? row_of(call.k, key)[c] : Half{0};
    }
    packed.odd[key] = there && !is_finite(row_of(call.v, key), call.head_dim_v);
    for (int c = 0; c < packed.columns_v; ++c) {
      rows[key * packed.columns_v + c] =
          there && !packed.odd[key] && c < call.head_dim_v ? row_of(call.v, key)[c] : Half{0};
    }
  }
  for (int c = 0; c < packed.columns_v; ++c) {
    for (int key = 0; key < block_kv; ++key) packed.Vt[c * block_kv + key] = rows[key * packed.columns_v + c];
  }
}

struct AmxScratch {
  alignas(64) float Q[max_head_dim / 2 * block_q];  // pairs of columns: [head_dim / 2][lanes]
  alignas(64) float Ot[max_head_dim * block_q];
  alignas(64) float S[block_kv * block_q];
  alignas(64) float P[block_kv / 2 * block_q];  // pairs of keys: [key / 2][lanes]
  alignas(64) float keep[block_kv * block_q];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
};

/// C[16 * a_tiles][16 * b_tiles] (+)= A B for one or two tiles each way; registers 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
/// A: rows of bfloat16, a_stride bytes apart. B and C: rows of 32-bit words, `lanes` apart. depth in steps of 32.
template <class Tiles, Start start, int a_tiles, int b_tiles>
inline void multiply_tiles(const Half* A, std::int64_t a_stride, const float* B, float* C, int lanes, int depth) {
  const std::int64_t row = 4 * lanes;  // bytes
  const auto c_at = [&](int a, int b) { return C + a * 16 * lanes + b * 16; };
  const auto begin = [&]<int tile>(int a, int b) {
    if constexpr (start == Start::zero) {
      Tiles::template zero<tile>();
    } else {
      Tiles::template load<tile>(c_at(a, b), row);
    }
  };
  begin.template operator()<0>(0, 0);
  if constexpr (b_tiles == 2) begin.template operator()<1>(0, 1);
  if constexpr (a_tiles == 2) begin.template operator()<2>(1, 0);
  if constexpr (a_tiles == 2 && b_tiles == 2) begin.template operator()<3>(1, 1);
  for (int k = 0; k < depth; ++k) {
    Tiles::template load<4>(A + k * 32, a_stride);
    Tiles::template load<6>(B + k * 16 * lanes, row);
    Tiles::template multiply<0, 4, 6>();
    if constexpr (b_tiles == 2) {
      Tiles::template load<7>(B + k * 16 * lanes + 16, row);
      Tiles::template multiply<1, 4, 7>();
    }
    if constexpr (a_tiles == 2) {
      Tiles::template load<5>(A + k * 32 + 16 * (a_stride / 2), a_stride);
      Tiles::template multiply<2, 5, 6>();
    }
    if constexpr (a_tiles == 2 && b_tiles == 2) Tiles::template multiply<3, 5, 7>();
  }
  Tiles::template store<0>(c_at(0, 0), row);
  if constexpr (b_tiles == 2) Tiles::template store<1>(c_at(0, 1), row);
  if constexpr (a_tiles == 2) Tiles::template store<2>(c_at(1, 0), row);
  if constexpr (a_tiles == 2 && b_tiles == 2) Tiles::template store<3>(c_at(1, 1), row);
}

/// All of C [16 * a_tiles][lanes], two tiles by two.
template <class Tiles, Start start>
inline void multiply_all(const Half* A, std::int64_t a_stride, int a_tiles, const float* B, float* C, int lanes,
                         int depth) {
  for (int a = 0; a < a_tiles; a += 2) {
    for (int lane = 0; lane < lanes; lane += 32) {
      const Half* rows = A + a * 16 * (a_stride / 2);
      float* to = C + a * 16 * lanes + lane;
      const bool one_a = a + 1 == a_tiles, one_b = lane + 16 == lanes;
      if (one_a && one_b) {
        multiply_tiles<Tiles, start, 1, 1>(rows, a_stride, B + lane, to, lanes, depth);
      } else if (one_a) {
        multiply_tiles<Tiles, start, 1, 2>(rows, a_stride, B + lane, to, lanes, depth);
      } else if (one_b) {
        multiply_tiles<Tiles, start, 2, 1>(rows, a_stride, B + lane, to, lanes, depth);
      } else {
        multiply_tiles<Tiles, start, 2, 2>(rows, a_stride, B + lane, to, lanes, depth);
      }
    }
  }
}

/// Q of the block, in pairs of columns: to[pair][lane], padded with 0.
inline void gather_pairs(const Call& call, const RowBlock& block, int pairs, float* to) {
  for (int v = 0; v < block.vectors; ++v) {
    for (int pair = 0; pair < pairs; pair += vector_lanes) {
      Vec square[vector_lanes];
      for (int lane = 0; lane < vector_lanes; ++lane) {
        const auto* row = reinterpret_cast<const float*>(block.row(call, call.q, v * vector_lanes + lane));
        square[lane] = load_some<Float32>(row + pair, larger(call.head_dim / 2 - pair, 0));
      }
      transpose(square);
      for (int p = 0; p < vector_lanes; ++p) store(to + ((pair + p) * block.vectors + v) * vector_lanes, square[p]);
    }
  }
}

/// softmax_amx for `width` vectors from lane `first` on.
template <int width>
inline bool softmax_strip(int keys, int lanes, int first, float factor, float* S, Statistics& statistics, float* rescale) {
  constexpr float slack = 8;  // P stays below 2^8
  Vec old[width], row_max[width], origin[width], sum[width];
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    old[v] = load(statistics.row_max + first + v * vector_lanes);
    row_max[v] = splat(-infinity);
    sum[v] = Vec{};
  }
  for (int key = 0; key < keys; ++key) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) row_max[v] = max(load(S + key * lanes + first + v * vector_lanes) * factor, row_max[v]);
  }
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    row_max[v] = select(row_max[v] > old[v] + slack, row_max[v], old[v]);
    origin[v] = select(row_max[v] == -infinity, Vec{}, row_max[v]);
  }
  for (int key = 0; key < keys; ++key) {
    FLASH_ATTENTION_UNROLL
    for (int v = 0; v < width; ++v) {
      float* s = S + key * lanes + first + v * vector_lanes;
      const Vec p = exp2(load(s) * factor - origin[v]);
      store(s, p);
      sum[v] += p;
    }
  }
  Int changed{};
  FLASH_ATTENTION_UNROLL
  for (int v = 0; v < width; ++v) {
    const int at = first + v * vector_lanes;
    const Vec scale = exp2(old[v] - origin[v]);
    store(rescale + at, scale);
    store(statistics.row_max + at, row_max[v]);
    store(statistics.row_sum + at, load(statistics.row_sum + at) * scale + sum[v]);
    changed |= row_max[v] != old[v];
  }
  bool moved = false;
  for (int lane = 0; lane < vector_lanes; ++lane) moved = moved || changed[lane] != 0;
  return moved;
}

/// P = 2^(factor * S - origin) in place, with an origin that moves only when it must. True where it moved for some lane.
inline bool softmax_amx(const RowBlock& block, int keys, float factor, float* S, Statistics& statistics, float* rescale) {
  bool moved = false;
  for (int v = 0; v < block.vectors;) {
    const int width = block.vectors - v >= 4 ? 4 : 1;
    const auto strip = width == 4 ? softmax_strip<4> : softmax_strip<1>;
    moved |= strip(keys, block.lanes(), v * vector_lanes, factor, S, statistics, rescale);
    v += width;
  }
  return moved;
}

template <class Tiles>
inline void pack_probabilities(const RowBlock& block, int keys, int padded, float* S, float* P) {
  const int lanes = block.lanes();
  for (int i = keys * lanes; i < padded * lanes; i += vector_lanes) store(S + i, Vec{});
  for (int pair = 0; pair < padded / 2; ++pair) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      store(P + pair * lanes + v, Tiles::pair(load(S + 2 * pair * lanes + v), load(S + (2 * pair + 1) * lanes + v)));
    }
  }
}

/// The rows of V that were left out of the tiles.
inline void add_odd_keys(const Call& call, const RowBlock& block, const Tile& tile, const Packed& packed,
                         AmxScratch& scratch) {
  SafeRows odd{};
  for (int key = 0; key < tile.count; ++key) {
    if (packed.odd[key] != 0) odd.odd[odd.num_odd++] = key;
  }
  if (odd.num_odd == 0) return;
  odd.original = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  add_odd_rows(odd, scratch.S, {block.lanes(), 1}, block.lanes(), scratch.Ot, {1, block.lanes()}, call.head_dim_v);
}

template <class Tiles>
inline void forward_amx(const Call& call, std::int64_t item_idx, void* memory) {
  AmxScratch& scratch = *static_cast<AmxScratch*>(memory);
  const ForwardItem item(call, item_idx);
  const RowBlock block = item.rows(call);
  if (block.rows == 0) return;

  Tiles::configure();
  const int lanes = block.lanes();
  gather_pairs(call, block, round_up(call.head_dim, 32) / 2, scratch.Q);
  scratch.statistics.reset();
  for (int i = 0; i < round_up(call.head_dim_v, 16) * lanes; ++i) scratch.Ot[i] = 0;
  const bool plain = call.softcap == 0 && call.bias.data == nullptr && call.alibi_slopes == nullptr;
  for (std::int64_t begin = block.key_begin / block_kv * block_kv; begin < block.key_end; begin += block_kv) {
    const Tile tile = make_tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const Packed packed(call, item.batch, item.kv_head, begin / block_kv);
    multiply_all<Tiles, Start::zero>(packed.K, packed.columns * 2, round_up(tile.count, 16) / 16, scratch.Q, scratch.S,
                                     lanes, packed.columns / 32);
    float factor = query_factor(call);
    if (!plain || tile.seen != Seen::all) {
      for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(scratch.S + i, load(scratch.S + i) * factor);
      finish_scores(call, block, tile, scratch.S);
      factor = 1;
    }
    const bool moved = softmax_amx(block, tile.count, factor, scratch.S, scratch.statistics, scratch.rescale);
    if (call.dropout) apply_dropout(call, block, tile, scratch.S, scratch.keep);
    if (moved) {
      for (int i = 0; i < call.head_dim_v * lanes; i += lanes) {
        for (int v = 0; v < lanes; v += vector_lanes) {
          store(scratch.Ot + i + v, load(scratch.Ot + i + v) * load(scratch.rescale + v));
        }
      }
    }
    const int padded = round_up(tile.count, 32);
    pack_probabilities<Tiles>(block, tile.count, padded, scratch.S, scratch.P);
    multiply_all<Tiles, Start::add>(packed.Vt, block_kv * 2, packed.columns_v / 16, scratch.P, scratch.Ot, lanes,
                                    padded / 32);
    add_odd_keys(call, block, tile, packed, scratch);
  }
  Tiles::release();

  finish_rows(call, block, item.split, scratch.statistics, scratch.rescale);
  scatter_rows(call, block, scratch.Ot, call.head_dim_v, scratch.rescale, call.out);
}

template <class Tiles>
constexpr KernelTable make_amx_table() {
  KernelTable table{};
  table.prefill[0] = {pack_items, pack};
  table.prefill[1] = {forward_items, forward_amx<Tiles>};
  table.scratch_bytes = sizeof(AmxScratch);
  return table;
}

}  // namespace
}  // namespace flash_attention::cpu
