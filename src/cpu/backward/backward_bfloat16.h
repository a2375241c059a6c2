#pragma once

// backward.h in bfloat16, for instructions that multiply pairs (pairs.h): the same five products a tile, with P and dS
// rounded.
//
//     S = K Q^T, dP = V dO^T                  K and V in place; Q and dO in pairs of columns
//     dV += P dO, dK += dS Q                  P and dS in rows; dO and Q in pairs of rows
//     dQt += K^T dS                           K^T packed; dS in pairs of keys
//
// A first step packs K and V (padded) and K^T of every tile of keys: CpuRegion::packed_K, packed_V and packed_Kt.
// nonfinite_tiles has a byte for each tile, set if it holds Inf or NaN. A block of rows that meets Inf or NaN is left
// to backward.h, which handles them if a mask hides them.

#include "cpu/backward/backward.h"
#include "cpu/tile/pairs.h"

namespace flash_attention::cpu {
namespace {

struct PackedPair {
  int columns, columns_v;  // multiples of 32
  Half* K;                 // [block_kv][columns]
  Half* V;                 // [block_kv][columns_v]
  Half* Kt;                // [columns][block_kv]
  std::uint8_t* nonfinite;

  PackedPair(const Call& call, std::int64_t batch, int kv_head, std::int64_t tile)
      : columns(round_up(call.head_dim, 32)), columns_v(round_up(call.head_dim_v, 32)) {
    const std::int64_t idx = key_place(call, batch, kv_head, block_kv) + tile;
    K = region<Half>(call, plan::CpuRegion::packed_K) + idx * block_kv * columns;
    V = region<Half>(call, plan::CpuRegion::packed_V) + idx * block_kv * columns_v;
    Kt = region<Half>(call, plan::CpuRegion::packed_Kt) + idx * block_kv * columns;
    nonfinite = region<std::uint8_t>(call, plan::CpuRegion::nonfinite_tiles) + idx;
  }
};

/// Packs one tile of keys.
inline void pack_backward(const Call& call, std::int64_t item, void* /*memory*/) {
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), tile = item % tiles, batch = item / tiles / call.heads_kv;
  const int kv_head = static_cast<int>(item / tiles % call.heads_kv);
  const KeyTile keys(call, batch, kv_head, tile);
  if (keys.count == 0) return;  // there is no place for tiles past the end of a shorter packed sequence
  const PackedPair packed(call, batch, kv_head, tile);
  LargestBits largest;
  for (int key = 0; key < keys.padded; ++key) {
    const bool there = key < keys.count;
    copy_halves(keys.row(call.k, key), there ? call.head_dim : 0, packed.K + key * packed.columns, packed.columns, largest);
    copy_halves(keys.row(call.v, key), there ? call.head_dim_v : 0, packed.V + key * packed.columns_v, packed.columns_v,
                largest);
  }
  *packed.nonfinite = !largest.all_finite();
  transpose_halves(packed.K, packed.columns, keys.padded, packed.columns, packed.Kt, block_kv);
}

constexpr int padded_q = round_up(block_q, 32);

struct Bfloat16BackwardScratch {
  RowTerms terms;
  alignas(64) float Q_columns[max_head_dim / 2 * block_q];  // pairs of columns: [head_dim / 2][lanes]
  alignas(64) float dO_columns[max_head_dim / 2 * block_q];
  alignas(64) float Q_rows[padded_q / 2 * max_head_dim];  // pairs of rows: [row / 2][columns]
  alignas(64) float dO_rows[padded_q / 2 * max_head_dim];
  alignas(64) float dQt[max_head_dim * block_q];
  alignas(64) float S[block_kv * block_q];
  alignas(64) float dP[block_kv * block_q];
  alignas(64) float derivative[block_kv * block_q];  // of softcap
  alignas(64) float slope[block_kv * block_q];       // of the program
  alignas(64) float keep[block_kv * block_q];        // of dropout
  alignas(64) Half P[block_kv * padded_q];           // rows: [key][depth]
  alignas(64) Half dS[block_kv * padded_q];
  alignas(64) float dS_keys[block_kv / 2 * block_q];  // pairs of keys: [key / 2][lanes]
  alignas(64) float factor[block_q];
  KeySums sums;
};

/// to[row / 2][column], words of two rows of the block; 0 past its last row and column.
inline void pair_rows(const Call& call, const RowBlock& block, const TensorView& tensor, int columns, int depth, float* to,
                      LargestBits& largest) {
  const int width = round_up(columns, 16);
  for (int row = 0; row < depth; row += 2) {
    const auto row_of = [&](int i) {
      return reinterpret_cast<const Half*>(block.row(call, tensor, smaller(i, block.rows - 1)));
    };
    const auto columns_of = [&](int i) { return i < block.rows ? columns : 0; };
    const Half *first = row_of(row), *second = row_of(row + 1);
    for (int c = 0; c < width; c += vector_lanes) {
      const Short low = load_halves(first + c, columns_of(row) - c),
                  high = load_halves(second + c, columns_of(row + 1) - c);
      largest.take(low);
      largest.take(high);
      store(to + row / 2 * width + c, interleave(low, high));
    }
  }
}

/// Loads the block's rows in all forms. Returns false if they hold Inf or NaN.
inline bool load_block(const Call& call, const RowBlock& block, int depth, Bfloat16BackwardScratch& scratch) {
  LargestBits largest;
  pair_rows(call, block, call.q, call.head_dim, depth, scratch.Q_rows, largest);
  pair_rows(call, block, call.dout, call.head_dim_v, depth, scratch.dO_rows, largest);
  bool finite = largest.all_finite();
  scratch.terms.load_terms(call, block);
  for (int lane = 0; lane < block.lanes(); ++lane) {
    finite = finite && scratch.terms.delta[lane] * 0.0f == 0.0f && scratch.terms.lse[lane] == scratch.terms.lse[lane];
  }
  if (!finite) return false;
  gather_pairs(call, block, call.q, call.head_dim, round_up(call.head_dim, 32), scratch.Q_columns);
  gather_pairs(call, block, call.dout, call.head_dim_v, round_up(call.head_dim_v, 32), scratch.dO_columns);
  return true;
}

/// P and dS of one vector of scores, as in ScoreGradient, but nothing is Inf or NaN here.
struct FiniteGradient {
  Vec p, ds;

  FLASH_ATTENTION_INLINE FiniteGradient(const Call& call, const Bfloat16BackwardScratch& scratch, int i, int lane,
                                        float factor) {
    const Vec s = load(scratch.S + i) * factor, delta = load(scratch.terms.delta + lane);
    p = exp2(s - load(scratch.terms.lse + lane));
    Vec dp = load(scratch.dP + i);
    if (call.dropout) {
      const Vec kept = load(scratch.keep + i);
      ds = p * (dp * kept - delta);
      p *= kept;
    } else {
      ds = p * (dp - delta);
    }
    ds = select(s == -infinity, Vec{}, ds);
    if (call.has_score_program()) ds = through_softcap(ds, load(scratch.slope + i));
    if (call.softcap > 0) ds = through_softcap(ds, load(scratch.derivative + i));
  }
};

/// Writes P and dS of a tile in the forms that the products take, with zeros from tile.count to `keys`.
template <class Products>
inline void round_gradients(const Call& call, const RowBlock& block, const Tile& tile, int keys, int depth, float factor,
                            Bfloat16BackwardScratch& scratch) {
  const int lanes = block.lanes();
  for (int key = 0; key < keys; key += 2) {
    for (int v = 0; v < lanes; v += vector_lanes) {
      Vec ds[2] = {};
      FLASH_ATTENTION_UNROLL
      for (int j = 0; j < 2; ++j) {
        Vec p{};
        if (key + j < tile.count) {
          const FiniteGradient gradient(call, scratch, (key + j) * lanes + v, v, factor);
          p = gradient.p;
          ds[j] = gradient.ds;
        }
        store(scratch.P + (key + j) * depth + v, Products::round(p));
        store(scratch.dS + (key + j) * depth + v, Products::round(ds[j]));
      }
      store(scratch.dS_keys + key / 2 * lanes + v, Products::pair(ds[0], ds[1]));
    }
    for (int j = 0; j < 2; ++j) {
      for (int v = lanes; v < depth; v += vector_lanes) {
        store(scratch.P + (key + j) * depth + v, Short{});
        store(scratch.dS + (key + j) * depth + v, Short{});
      }
    }
  }
}

/// Processes a tile: S and dP, their gradients, and the sums.
template <class Products>
inline void backward_tile_bfloat16(const Call& call, const RowBlock& block, const Tile& tile, const PackedPair& packed,
                                   int depth, const KeyGradients& sums, Bfloat16BackwardScratch& scratch) {
  const int lanes = block.lanes(), rows = round_up(tile.count, Products::row_unit);
  const int keys = round_up(tile.count, larger(Products::depth_unit, Products::row_unit));
  const auto scores = [&](const Half* A, int columns, const float* B, float* C) {
    Products::template multiply<Start::zero>({A, columns, B, lanes, C, lanes, rows, columns, lanes});
  };
  scores(packed.K, packed.columns, scratch.Q_columns, scratch.S);
  scores(packed.V, packed.columns_v, scratch.dO_columns, scratch.dP);

  float factor = query_factor(call);
  if (call.softcap > 0 || call.alibi_slopes != nullptr || call.has_score_program() || !(factor > 0)) {
    for (int i = 0; i < tile.count * lanes; i += vector_lanes) store(scratch.S + i, load(scratch.S + i) * factor);
    finish_scores(call, block, tile, scratch.S, {.first = scratch.derivative}, {.slope = scratch.slope});
    factor = 1;
  } else {
    hide_scores(block, tile, scratch.S);
  }
  if (call.dropout) dropout_factors(call, block, tile, scratch.keep);
  round_gradients<Products>(call, block, tile, keys, depth, factor, scratch);

  const auto add_to_keys = [&](const Half* A, const float* B, int columns, float* C) {
    const int width = round_up(columns, 16);
    Products::template multiply<Start::add>({A, depth, B, width, C, sums.stride(), rows, depth, width});
  };
  add_to_keys(scratch.P, scratch.dO_rows, call.head_dim_v, sums.dV(tile.begin));
  add_to_keys(scratch.dS, scratch.Q_rows, call.head_dim, sums.dK(tile.begin));
  Products::template multiply<Start::add>(
      {packed.Kt, block_kv, scratch.dS_keys, lanes, scratch.dQt, lanes, packed.columns, keys, lanes});
}

/// Loads the block's rows. Returns false if they or its keys hold Inf or NaN.
template <class Products>
inline bool start_block(const Call& call, RowBlock& block, int depth, Bfloat16BackwardScratch& scratch) {
  block.key_begin = block.key_begin / block_kv * block_kv;  // the packed tiles begin there
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    if (*PackedPair(call, block.batch, block.kv_head, begin / block_kv).nonfinite != 0) return false;
  }
  if (!load_block(call, block, depth, scratch)) return false;
  for (int i = 0; i < round_up(call.head_dim, 32) * block.lanes(); ++i) scratch.dQt[i] = 0;
  return true;
}

template <class Products>
inline void add_tiles(const Call& call, const RowBlock& block, int depth, const KeyGradients& sums,
                      Bfloat16BackwardScratch& scratch) {
  Products::begin();
  ProgramRun run;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin, block_kv, run.at(call, block, begin, block.key_end));
    if (tile.seen == Seen::none) continue;
    const PackedPair packed(call, block.batch, block.kv_head, begin / block_kv);
    backward_tile_bfloat16<Products>(call, block, tile, packed, depth, sums, scratch);
  }
  Products::end();
}

/// Returns false if the block meets Inf or NaN.
template <class Products>
inline bool backward_block_bfloat16(const Call& call, RowBlock block, const KeyGradients& sums,
                                    Bfloat16BackwardScratch& scratch) {
  const int depth = round_up(block.lanes(), Products::depth_unit);
  if (!start_block<Products>(call, block, depth, scratch)) return false;
  if (call.dsink != nullptr) write_sink_terms(call, block, scratch.terms);
  add_tiles<Products>(call, block, depth, sums, scratch);
  write_dq(call, block, 0, scratch.dQt, scratch.factor);
  return true;
}

/// Processes the keys of one split, for all rows of their head. Returns false if they meet Inf or NaN.
template <class Products>
inline bool backward_keys_bfloat16(const Call& call, std::int64_t item, Bfloat16BackwardScratch& scratch) {
  const KeyItem at(call, item);
  RowBlock block(call, at.batch, at.kv_head * call.group, call.group, 0);
  if (block.rows == 0) return false;
  const int depth = round_up(block.lanes(), Products::depth_unit);
  if (!start_block<Products>(call, block, depth, scratch)) return false;
  take_keys(call, at.split, block, block);
  if (call.dsink != nullptr && at.split == 0) write_sink_terms(call, block, scratch.terms);
  for_key_sums(call, block, block, scratch.sums,
               [&](const KeyGradients& sums) { add_tiles<Products>(call, block, depth, sums, scratch); });
  write_dq(call, block, at.split, scratch.dQt, scratch.factor);
  return true;
}

template <class Products>
inline void backward_bfloat16(const Call& call, std::int64_t item, void* memory) {
  if (splits_keys(call)) {
    if (backward_keys_bfloat16<Products>(call, item, *static_cast<Bfloat16BackwardScratch*>(memory))) return;
    return backward_keys(call, item, *static_cast<BackwardScratch*>(memory));
  }
  for_each_block(call, item, [&](const BlockList& blocks, const KeyGradients& sums) {
    if (backward_block_bfloat16<Products>(call, blocks[0], sums, *static_cast<Bfloat16BackwardScratch*>(memory))) return;
    backward_blocks(call, blocks, sums, *static_cast<BackwardScratch*>(memory));
  });
}

}  // namespace
}  // namespace flash_attention::cpu
