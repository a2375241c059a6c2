#pragma once

// Forward for a few queries, where reading K and V is all the work: the keys are split over the threads and merged, the
// query heads of a key head share one reading. With so few queries the lanes go along head_dim instead:
//
//     S[key][query] = dot(K[key], Q[query])       a square of accumulators, summed across by a butterfly
//     O[query]      = rescale * O + P[key][query] * V[key]
//
// Scores lie as in prefill, so masks and softmax are the same functions.

#include "cpu/generic/prefill.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_rows = plan::cpu_decode_rows;

struct DecodeScratch {
  alignas(64) float Q[round_up(decode_rows, vector_lanes) * max_head_dim];
  alignas(64) float O[round_up(decode_rows, vector_lanes) * max_head_dim];
  alignas(64) float S[block_kv * round_up(decode_rows, vector_lanes)];
  alignas(64) float keep[block_kv * round_up(decode_rows, vector_lanes)];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
};

/// S[key][first + r] = dot(K[key], Q[first + r]) for r < rows: vector_lanes of these dot products at a time.
template <int rows>
inline void dot_tile(FloatRows K, int keys, const float* Q, int columns, int first, float* S, int lanes) {
  constexpr int step = vector_lanes / rows;
  for (int key = 0; key < keys; key += step) {
    const float* k[step];
    FLASH_ATTENTION_UNROLL
    for (int j = 0; j < step; ++j) k[j] = K.data + smaller(key + j, keys - 1) * K.stride;
    Vec sum[vector_lanes] = {};
    for (int c = 0; c < columns; c += vector_lanes) {
      Vec q[rows];
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) q[r] = load(Q + (first + r) * columns + c);
      FLASH_ATTENTION_UNROLL
      for (int j = 0; j < step; ++j) {
        const Vec values = load(k[j] + c);
        FLASH_ATTENTION_UNROLL
        for (int r = 0; r < rows; ++r) sum[j * rows + r] += values * q[r];
      }
    }
    alignas(64) float dots[vector_lanes];
    store(dots, sum_each(sum));
    for (int j = 0; j < smaller(step, keys - key); ++j) {
      for (int r = 0; r < rows; ++r) S[(key + j) * lanes + first + r] = dots[j * rows + r];
    }
  }
}

/// All rows, four at a time. Q and S have room for a multiple of four rows; those past the last are never looked at.
inline void dot_rows(const RowBlock& block, FloatRows K, int keys, const float* Q, int columns, float* S) {
  if (block.rows == 1) return dot_tile<1>(K, keys, Q, columns, 0, S, block.lanes());
  if (block.rows == 2) return dot_tile<2>(K, keys, Q, columns, 0, S, block.lanes());
  for (int first = 0; first < block.rows; first += 4) dot_tile<4>(K, keys, Q, columns, first, S, block.lanes());
}

/// Asks for the rows of the tile after this one, which the strides of a [seq, heads, dim] tensor hide from the hardware.
inline void prefetch_next(const Call& call, const RowBlock& block, const TensorView& tensor, std::int64_t begin, int columns) {
  const int bytes = columns * size_of(call.element);
  const std::int64_t last = smaller(block.key_end, begin + 2 * block_kv);
  for (std::int64_t j = begin + block_kv; j < last; ++j) {
    const char* row = block.keys(call, tensor) + j * tensor.seq_stride * size_of(call.element);
    for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
  }
}

inline void decode(const Call& call, std::int64_t item_idx, void* memory) {
  DecodeScratch& scratch = *static_cast<DecodeScratch*>(memory);
  const ForwardItem item(call, item_idx);
  RowBlock block = item.rows(call);
  if (block.rows == 0) return;
  take_split(call, item.split, block);

  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  for (float& score : scratch.S) score = 0;
  for (float& value : scratch.Q) value = 0;
  for (float& sum : scratch.O) sum = 0;
  with_element(call.element, [&](auto type) {
    using T = decltype(type);
    for (int r = 0; r < block.rows; ++r) {
      const auto* q = reinterpret_cast<const typename T::Stored*>(block.row(call, call.q, r));
      copy_row<T>(q, call.head_dim, scratch.Q + r * columns, columns);
      for (int c = 0; c < columns; ++c) scratch.Q[r * columns + c] *= query_factor(call);
    }
  });
  scratch.statistics.reset();

  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile = make_tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    prefetch_next(call, block, call.k, begin, call.head_dim);
    const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, true, scratch.K);
    dot_rows(block, K, tile.count, scratch.Q, columns, scratch.S);
    finish_scores(call, block, tile, scratch.S);
    softmax_tile(block, tile, scratch.S, scratch.statistics, scratch.rescale);
    if (call.dropout) apply_dropout(call, block, tile, scratch.S, scratch.keep);

    prefetch_next(call, block, call.v, begin, call.head_dim_v);
    const FloatRows V = key_rows(call, block, call.v, begin, tile.count, call.head_dim_v, true, scratch.V);
    for (int r = 0; r < block.rows; ++r) {
      float* sum = scratch.O + r * columns_v;
      for (int c = 0; c < columns_v; c += vector_lanes) store(sum + c, load(sum + c) * scratch.rescale[r]);
    }
    const SafeRows safe = make_safe(V, tile.count, columns_v, tile.weighted, scratch.safe);
    multiply<Start::add, Order::column_major>({.A = scratch.S, .a_stride = block.lanes(), .B = safe.rows.data,
                                               .b_stride = safe.rows.stride, .C = scratch.O, .c_stride = columns_v,
                                               .rows = block.rows, .depth = tile.count,
                                               .vectors = columns_v / vector_lanes});
    add_odd_rows(safe, scratch.S, {block.lanes(), 1}, block.rows, scratch.O, {columns_v, 1}, call.head_dim_v);
  }

  finish_rows(call, block, item.split, scratch.statistics, scratch.rescale);
  for (int r = 0; r < block.rows; ++r) {
    const float* sum = scratch.O + r * columns_v;
    const auto write = [&](auto type, void* to) {
      using T = decltype(type);
      for (int c = 0; c < call.head_dim_v; c += vector_lanes) {
        store_some<T>(static_cast<typename T::Stored*>(to) + c, load(sum + c) * scratch.rescale[r], call.head_dim_v - c);
      }
    };
    if (call.num_splits > 1) {
      write(Float32{}, partial_sums(call, item.split, block.row_idx(call, r)));
    } else {
      with_element(call.element, [&](auto type) { write(type, block.row(call, call.out, r)); });
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
