#pragma once

// Backward for as few queries as decode.h takes: reading K and V and writing dK and dV is nearly all of the work. As in
// decode.h, lanes go along head_dim and along the keys:
//
//     S[row][key] = dot(Q[row], K[key]), dP[row][key] = dot(dO[row], V[key])
//     P, dS                                       a row at a time; gradient.h
//     dV[key] = sum of P[row][key] * dO[row]      written at once: no other rows add to it
//     dK[key] = sum of dS[row][key] * scale * Q[row]
//     dQ[row] += sum of dS[row][key] * K[key]
//
// The keys are split over the threads, and merge_dq.h adds up dQ.

#include "cpu/backward/backward.h"
#include "cpu/decode/decode_products.h"
#include "cpu/decode/decode_scores.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_rows = plan::cpu_backward_decode_rows;
constexpr int few_lanes = round_up(decode_rows, vector_lanes);

struct BackwardDecodeScratch {
  RowTerms terms;
  alignas(64) float Q[decode_rows * max_head_dim];  // rows of whole vectors
  alignas(64) float dO[decode_rows * max_head_dim];
  alignas(64) float dQ[decode_rows * max_head_dim];
  alignas(64) float P[few_lanes * block_kv];  // [row][key]: first S, then P with dropout
  alignas(64) float dS[few_lanes * block_kv];
  alignas(64) float derivative[few_lanes * block_kv];  // of softcap
  alignas(64) float keep[few_lanes * block_kv];        // of dropout
  alignas(64) float keep_lanes[block_kv * few_lanes];  // [key][lane]
  alignas(64) float ones[few_lanes];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float sums[block_kv * max_head_dim];  // dK or dV of a tile
};

inline void start_rows(const Call& call, const RowBlock& block, BackwardDecodeScratch& scratch) {
  for (float& one : scratch.ones) one = 1;
  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  const int padded = block.rows <= 2 ? block.rows : round_up(block.rows, 4);  // padded to what the products take
  for (int i = 0; i < padded * columns; ++i) scratch.dQ[i] = 0;
  for (int i = block.rows * columns; i < padded * columns; ++i) scratch.Q[i] = 0;
  for (int i = block.rows * columns_v; i < padded * columns_v; ++i) scratch.dO[i] = 0;
  copy_rows(call, block, call.q, call.head_dim, scratch.Q);
  for (int i = 0; i < block.rows * columns; ++i) scratch.Q[i] *= call.scale;
  copy_rows(call, block, call.dout, call.head_dim_v, scratch.dO);
  scratch.terms.load_terms(call, block);
}

/// Dropout's factors, in rows.
inline void keep_in_rows(const Call& call, const RowBlock& block, const Tile& tile, BackwardDecodeScratch& scratch) {
  dropout_factors(call, block, tile, scratch.keep_lanes);
  scatter_lanes<Float32>(scratch.keep_lanes, block.vectors, block.rows, tile.count, scratch.ones,
                         [&](int lane) { return scratch.keep + lane * block_kv; });
}

/// P and dS in place.
inline void score_gradients(const Call& call, const RowBlock& block, const Tile& tile, BackwardDecodeScratch& scratch) {
  for (int row = 0; row < block.rows; ++row) {
    const Vec lse = splat(scratch.terms.lse[row]), delta = splat(scratch.terms.delta[row]);
    for (int key = 0; key < tile.count; key += vector_lanes) {
      const int i = row * block_kv + key, count = tile.count - key;
      const Vec kept = call.dropout ? load(scratch.keep + i) : splat(1.0f);
      const ScoreGradient gradient(load(scratch.P + i), load(scratch.dS + i), kept, lse, delta);
      const Vec ds = call.softcap > 0 ? through_softcap(gradient.ds, load(scratch.derivative + i)) : gradient.ds;
      store_some<Float32>(scratch.P + i, gradient.p, count);
      store_some<Float32>(scratch.dS + i, ds, count);
    }
  }
}

/// to[key] = sum over the rows of W[row][key] * rows[row].
inline void write_keys(const Call& call, const RowBlock& block, const Tile& tile, const float* W, const float* rows,
                       int columns, const TensorView& to, BackwardDecodeScratch& scratch) {
  const int stride = round_up(columns, vector_lanes);
  const SafeRows safe = make_safe({rows, stride}, block.rows, stride, tile.weighted, scratch.safe);
  const auto sum_rows = [&](float* sums, std::int64_t sums_stride) {
    multiply<Start::zero, Order::column_major>({.A = W,
                                                .a_stride = block_kv,
                                                .B = safe.rows.data,
                                                .b_stride = safe.rows.stride,
                                                .C = sums,
                                                .c_stride = sums_stride,
                                                .rows = tile.count,
                                                .depth = block.rows,
                                                .vectors = stride / vector_lanes});
    add_nonfinite_rows(safe, W, {block_kv, 1}, tile.count, sums, {sums_stride, 1}, columns);
  };
  if (call.dtype == Dtype::float32 && columns == stride) {
    return sum_rows(key_row<Float32>(call, block, to, tile.begin), to.seq_stride);
  }
  sum_rows(scratch.sums, stride);
  with_element(call.dtype, [&](auto type) {
    using T = decltype(type);
    auto* row = key_row<T>(call, block, to, tile.begin);
    for (int key = 0; key < tile.count; ++key, row += to.seq_stride) {
      for (int c = 0; c < columns; c += vector_lanes) {
        store_some<T>(row + c, load(scratch.sums + key * stride + c), columns - c);
      }
    }
  });
}

/// Prefetches the keys and the values of the tile that begins at `begin`, while another tile is processed.
struct PrefetchBoth {
  NextTile keys, values;

  PrefetchBoth(const Call& call, const RowBlock& block, std::int64_t begin)
      : keys(ahead(call, block, call.k, call.head_dim, begin)),
        values(ahead(call, block, call.v, call.head_dim_v, begin)) {}

 private:
  static NextTile ahead(const Call& call, const RowBlock& block, const TensorView& tensor, int columns,
                        std::int64_t begin) {
    const int lines = (columns * bytes_of(call.dtype) + 63) / 64;  // of a row
    const std::int64_t steps = ceil_div(block_kv * block.rows, vector_lanes);
    const RowPrefetch rows = prefetch_of_rows(call, block, tensor, columns, 1, begin, begin + block_kv);
    return {rows, rows, static_cast<int>(ceil_div(block_kv * lines, steps)), 0};
  }
};

/// P and dS of a tile, dV and dK.
template <class T>
inline void key_gradients(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<T> K, KeyRows<T> V,
                          BackwardDecodeScratch& scratch, PrefetchBoth& next) {
  const float factor = call.softcap > 0 ? 1 / call.softcap : log2_e;  // Q includes the scale
  dot_rows<FloatDots<T>>(block.rows, K, tile.count, scratch.Q, call.head_dim, factor, scratch.P, next.keys);
  dot_rows<FloatDots<T>>(block.rows, V, tile.count, scratch.dO, call.head_dim_v, 1, scratch.dS, next.values);
  finish_scores_in_rows(call, block, tile, scratch.P, scratch.derivative);
  if (call.dropout) keep_in_rows(call, block, tile, scratch);
  score_gradients(call, block, tile, scratch);
  write_keys(call, block, tile, scratch.P, scratch.dO, call.head_dim_v, call.dv, scratch);
  write_keys(call, block, tile, scratch.dS, scratch.Q, call.head_dim, call.dk, scratch);
}

/// Processes a tile that every row sees, with K and V in place.
template <class T>
inline void backward_in_place(const Call& call, const RowBlock& block, const Tile& tile, BackwardDecodeScratch& scratch,
                              PrefetchBoth& next) {
  const KeyRows<T> K{key_row<T>(call, block, call.k, tile.begin), call.k.seq_stride};
  const KeyRows<T> V{key_row<T>(call, block, call.v, tile.begin), call.v.seq_stride};
  key_gradients(call, block, tile, K, V, scratch, next);
  FloatDots<T>::add_values(block.rows, scratch.dS, K, tile.count, scratch.dQ, call.head_dim);
}

/// Processes a tile of which something is hidden or dropped; see hidden.h.
inline void backward_behind_mask(const Call& call, const RowBlock& block, const Tile& tile, BackwardDecodeScratch& scratch,
                                 PrefetchBoth& next) {
  using Rows = KeyRows<Float32>;
  const FloatRows K = key_rows(call, block, call.k, tile.begin, tile.count, call.head_dim, false, scratch.K);
  const FloatRows V = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  key_gradients(call, block, tile, Rows{K.data, K.stride}, Rows{V.data, V.stride}, scratch, next);
  const SafeRows safe = make_safe(K, tile.count, call.head_dim, false, scratch.safe);
  FloatDots<Float32>::add_values(block.rows, scratch.dS, {safe.rows.data, safe.rows.stride}, tile.count, scratch.dQ,
                                 call.head_dim);
  add_nonfinite_rows(safe, scratch.dS, {1, block_kv}, block.rows, scratch.dQ, {round_up(call.head_dim, vector_lanes), 1},
                     call.head_dim);
}

inline void write_dq(const Call& call, const RowBlock& block, int split, const BackwardDecodeScratch& scratch) {
  const int stride = round_up(call.head_dim, vector_lanes);
  for (int row = 0; row < block.rows; ++row) {
    const float* sums = scratch.dQ + row * stride;
    if (call.num_splits == 1) {
      write_dq(call, block, row, sums, 1, 0);
    } else {
      copy_row<Float32>(sums, stride, partial_dq(call, split, block.row_idx(call, row)), stride);
    }
  }
}

inline void backward_decode(const Call& call, std::int64_t item, void* memory) {
  BackwardDecodeScratch& scratch = *static_cast<BackwardDecodeScratch*>(memory);
  const KeyItem at(call, item);
  RowBlock block(call, at.batch, at.kv_head * call.group, call.group, 0);
  take_keys(call, at.split, block, block);
  if (block.rows == 0) return;
  start_rows(call, block, scratch);
  if (call.dsink != nullptr && at.split == 0) write_sink_terms(call, block, scratch.terms);
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile(call, block, begin);
    PrefetchBoth next(call, block, begin + block_kv);
    if (tile.seen == Seen::none) {
      clear_keys(call, block, begin, begin + tile.count);
    } else if (tile.weighted) {
      with_element(call.dtype, [&](auto type) { backward_in_place<decltype(type)>(call, block, tile, scratch, next); });
    } else {
      backward_behind_mask(call, block, tile, scratch, next);
    }
  }
  write_dq(call, block, at.split, scratch);
}

}  // namespace
}  // namespace flash_attention::cpu
