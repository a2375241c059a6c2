#pragma once

// Forward in bfloat16 for instructions that multiply pairs (pairs.h): prefill.h with other products. Queries stay in
// lanes, so options and masks are the same functions:
//
//     S  = K Q^T                                     K in place; Q in pairs of columns
//     P  = 2^(scale * S - origin)                    rounded to bfloat16 in pairs of keys; bfloat16_scores.h
//     Ot = Ot + V^T P                                V^T packed
//
// A first step packs K (padded) and V (transposed) of every tile of keys, once for all blocks of queries. If there is
// only one block, bfloat16_once.h avoids that.
//
// CpuRegion::packed_K and packed_Vt hold them, for the tiles of all sequences. nonfinite_keys tells which rows of V
// hold Inf or NaN. Such a row is packed as 0 and added as in hidden.h.

#include "cpu/prefill/bfloat16_once.h"

namespace flash_attention::cpu {
namespace {

struct PackedKeys {
  int columns, columns_v;   // head_dim in multiples of 32, head_dim_v of 16
  Half* K;                  // [block_kv][columns]
  Half* Vt;                 // [columns_v][block_kv]
  std::uint8_t* nonfinite;  // [block_kv]
  std::uint8_t* any_nonfinite;

  PackedKeys(const Call& call, std::int64_t batch, int kv_head, std::int64_t tile)
      : columns(round_up(call.head_dim, 32)), columns_v(round_up(call.head_dim_v, 16)) {
    const std::int64_t idx = key_place(call, batch, kv_head, block_kv) + tile;
    K = region<Half>(call, plan::CpuRegion::packed_K) + idx * block_kv * columns;
    Vt = region<Half>(call, plan::CpuRegion::packed_Vt) + idx * block_kv * columns_v;
    nonfinite = region<std::uint8_t>(call, plan::CpuRegion::nonfinite_keys) + idx * (block_kv + 1);
    any_nonfinite = nonfinite + block_kv;
  }
};

/// Packs one tile of keys. rows: memory for V without its nonfinite rows, [block_kv][columns_v]
inline void pack_tile(const Call& call, const KeyTile& keys, const PackedKeys& packed, Half* rows) {
  LargestBits of_k, of_v;
  for (int key = 0; key < keys.padded; ++key) {
    const bool there = key < keys.count;
    packed.nonfinite[key] = 0;
    copy_halves(keys.row(call.k, key), there ? call.head_dim : 0, packed.K + key * packed.columns, packed.columns, of_k);
    copy_halves(keys.row(call.v, key), there ? call.head_dim_v : 0, rows + key * packed.columns_v, packed.columns_v, of_v);
  }
  *packed.any_nonfinite = !of_v.all_finite();
  for (int key = 0; *packed.any_nonfinite && key < keys.count; ++key) {
    LargestBits of_row;
    copy_halves(keys.row(call.v, key), call.head_dim_v, rows + key * packed.columns_v, packed.columns_v, of_row);
    packed.nonfinite[key] = !of_row.all_finite();
    if (packed.nonfinite[key] != 0) copy_halves(rows, 0, rows + key * packed.columns_v, packed.columns_v, of_row);
  }
  transpose_halves(rows, packed.columns_v, keys.padded, packed.columns_v, packed.Vt, block_kv);
}

inline std::int64_t pack_ahead_items(const Call& call) { return call.packs_keys ? pack_items(call) : 0; }

inline void pack_ahead(const Call& call, std::int64_t item, void* memory) {
  const std::int64_t tiles = ceil_div(call.seq_kv, block_kv), tile = item % tiles, batch = item / tiles / call.heads_kv;
  const int kv_head = static_cast<int>(item / tiles % call.heads_kv);
  const KeyTile keys(call, batch, kv_head, tile);
  if (keys.count == 0) return;  // there is no place for tiles past the end of a shorter packed sequence
  pack_tile(call, keys, PackedKeys(call, batch, kv_head, tile), static_cast<Half*>(memory));
}

/// Processes one packed tile of keys.
template <class Products>
inline void attend_packed(const Call& call, const RowBlock& block, const Tile& tile, Bfloat16Scratch& scratch) {
  const PackedKeys packed(call, block.batch, block.kv_head, tile.begin / block_kv);
  const int lanes = block.lanes(), keys = round_up(tile.count, Products::depth_unit);
  if (probabilities<Products>(call, block, tile, {packed.K, packed.columns}, keys, scratch)) {
    for (int i = 0; i < call.head_dim_v * lanes; i += lanes) {
      for (int v = 0; v < lanes; v += vector_lanes) {
        store(scratch.O + i + v, load(scratch.O + i + v) * load(scratch.rescale + v));
      }
    }
  }
  Products::template multiply<Start::add>({.A = packed.Vt,
                                           .a_stride = block_kv,
                                           .B = scratch.P,
                                           .b_stride = lanes,
                                           .C = scratch.O,
                                           .c_stride = lanes,
                                           .rows = packed.columns_v,
                                           .depth = keys,
                                           .lanes = lanes});
  if (*packed.any_nonfinite != 0) add_nonfinite_keys(call, block, tile, packed.nonfinite, keys, {1, lanes}, scratch);
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
  for (int i = 0; i < round_up(call.head_dim_v, 16) * block.lanes(); ++i) scratch.O[i] = 0;
  ProgramRun run;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin, block_kv, run.at(call, block, begin, block.key_end));
    if (tile.seen == Seen::none) continue;
    if (call.packs_keys) {
      attend_packed<Products>(call, block, tile, scratch);
    } else {
      attend_once<Products>(call, block, tile, scratch);
    }
  }
  Products::end();

  if (call.packs_keys) {
    write_block(call, block, item.split, scratch.statistics, scratch.O, scratch.rescale);
  } else {
    write_rows(call, block, item.split, scratch.statistics, scratch.O, round_up(call.head_dim_v, 16), scratch.rescale);
  }
}

}  // namespace
}  // namespace flash_attention::cpu
