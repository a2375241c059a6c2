#pragma once

// Forward for a few queries, where reading K and V is all the work: the keys are split over the threads and merged, and the
// query heads of a key head share one reading. With so few rows the lanes go along head_dim and along the keys instead:
//
//     S[row][key] = dot(Q[row], K[key])                a square of accumulators, summed across by a butterfly
//     P = 2^(S - row_max), row_sum, rescale            a row at a time
//     O[row]      = rescale * O[row] + sum of P[row][key] * V[key]
//
// K and V are converted in registers on their way into the products. The options of a score work on S^T, as in prefill.

#include "cpu/generic/prefill.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_rows = plan::cpu_decode_rows;
constexpr int decode_lanes = round_up(decode_rows, vector_lanes);

struct DecodeScratch {
  alignas(64) float Q[decode_lanes * max_head_dim];
  alignas(64) float O[decode_lanes * max_head_dim];
  alignas(64) float S[decode_lanes * block_kv];   // [row][key]
  alignas(64) float St[block_kv * decode_lanes];  // [key][lane]
  alignas(64) float keep[block_kv * decode_lanes];
  alignas(64) float K[block_kv * max_head_dim];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  Statistics statistics;
};

/// Rows of keys as they lie in memory.
template <class T>
struct KeyRows {
  const typename T::Stored* data;
  std::int64_t stride;
};

/// S[first + r][key] = dot(K[key], Q[first + r]) for r < rows: vector_lanes of these at a time. Meanwhile asks for what is
/// read next, which the strides of a [seq, heads, dim] tensor hide from the hardware: these rows of V, the next ones of K.
template <int rows, class T>
inline void dot_tile(KeyRows<T> K, KeyRows<T> V, int keys, const float* Q, int columns, int columns_v, float* S) {
  constexpr int step = vector_lanes / rows;
  constexpr int line = 64 / static_cast<int>(sizeof(typename T::Stored));
  for (int key = 0; key < keys; key += step) {
    const typename T::Stored* k[step];
    FLASH_ATTENTION_UNROLL
    for (int j = 0; j < step; ++j) {
      k[j] = K.data + smaller(key + j, keys - 1) * K.stride;
      for (int c = 0; c < columns; c += line) __builtin_prefetch(k[j] + block_kv * K.stride + c);
      for (int c = 0; c < columns_v; c += line) __builtin_prefetch(V.data + (key + j) * V.stride + c);
    }
    Vec sum[vector_lanes] = {};
    for (int c = 0; c < columns; c += vector_lanes) {
      Vec q[rows];
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) q[r] = load(Q + r * columns + c);
      FLASH_ATTENTION_UNROLL
      for (int j = 0; j < step; ++j) {
        const Vec values = T::load(k[j] + c);
        FLASH_ATTENTION_UNROLL
        for (int r = 0; r < rows; ++r) sum[r * step + j] += values * q[r];
      }
    }
    alignas(64) float dots[vector_lanes];
    store(dots, sum_each(sum));
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) {
      FLASH_ATTENTION_UNROLL
      for (int j = 0; j < step; ++j) S[r * block_kv + key + j] = dots[r * step + j];
    }
  }
}

/// All rows. Q and S have room for whole groups; rows past the last are never looked at.
template <class T>
inline void dot_rows(int rows, KeyRows<T> K, KeyRows<T> V, int keys, const float* Q, int columns, int columns_v, float* S) {
  if (rows == 1) return dot_tile<1>(K, V, keys, Q, columns, columns_v, S);
  if (rows == 2) return dot_tile<2>(K, V, keys, Q, columns, columns_v, S);
  constexpr int group = smaller(decode_rows, vector_lanes);
  if (rows <= 4) return dot_tile<4>(K, V, keys, Q, columns, columns_v, S);
  for (int r = 0; r < rows; r += group) {
    dot_tile<group>(K, V, keys, Q + r * columns, columns, columns_v, S + r * block_kv);
  }
}

/// Softcap, bias, ALiBi and masks.
inline void finish_decode_scores(const Call& call, const RowBlock& block, const Tile& tile, DecodeScratch& scratch) {
  const bool plain = call.softcap == 0 && call.bias.data == nullptr && call.alibi_slopes == nullptr;
  if (plain && tile.seen == Seen::all) return;
  const auto row_of = [&](int lane) { return scratch.S + smaller(lane, block.rows - 1) * block_kv; };
  gather_lanes<Float32>(row_of, block.vectors, tile.count, 1, scratch.St);
  finish_scores(call, block, tile, scratch.St);
  for (int lane = 0; lane < block.lanes(); ++lane) scratch.rescale[lane] = 1;
  scatter_lanes<Float32>(scratch.St, block.vectors, block.rows, tile.count, scratch.rescale, row_of);
}

/// P in place, over whole vectors: what is past the keys becomes 0.
inline void softmax_row(int row, int keys, DecodeScratch& scratch) {
  float* S = scratch.S + row * block_kv;
  const int padded = round_up(keys, vector_lanes);
  for (int key = keys; key < padded; ++key) S[key] = -infinity;
  const float old_max = scratch.statistics.row_max[row];
  Vec largest = splat(old_max), sum{};
  for (int key = 0; key < padded; key += vector_lanes) largest = max(load(S + key), largest);
  const float row_max = largest_lane(largest);
  const float origin = row_max == -infinity ? 0 : row_max;
  for (int key = 0; key < padded; key += vector_lanes) {
    const Vec p = exp2(load(S + key) - origin);
    store(S + key, p);
    sum += p;
  }
  const float factor = exp2_one(old_max - origin);
  scratch.rescale[row] = factor;
  scratch.statistics.row_max[row] = row_max;
  scratch.statistics.row_sum[row] = scratch.statistics.row_sum[row] * factor + sum_lanes(sum);
}

/// One tile whose rows are of type T and whole vectors wide.
template <class T>
inline void decode_scores(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<T> K, KeyRows<T> V,
                          DecodeScratch& scratch) {
  const int columns = round_up(call.head_dim, vector_lanes);
  dot_rows<T>(block.rows, K, V, tile.count, scratch.Q, columns, call.head_dim_v, scratch.S);
  finish_decode_scores(call, block, tile, scratch);
  for (int row = 0; row < block.rows; ++row) softmax_row(row, tile.count, scratch);
  if (!call.dropout) return;
  dropout_factors(call, block, tile, scratch.keep);
  for (int row = 0; row < block.rows; ++row) {
    for (int key = 0; key < tile.count; ++key) scratch.S[row * block_kv + key] *= scratch.keep[key * block.lanes() + row];
  }
}

template <class T>
inline void decode_values(const RowBlock& block, const Tile& tile, KeyRows<T> V, int columns, DecodeScratch& scratch) {
  for (int row = 0; row < block.rows; ++row) {
    float* sum = scratch.O + row * columns;
    for (int c = 0; c < columns; c += vector_lanes) store(sum + c, load(sum + c) * scratch.rescale[row]);
  }
  multiply<Start::add, Order::row_major, T>({.A = scratch.S,
                                             .a_stride = block_kv,
                                             .B = V.data,
                                             .b_stride = V.stride,
                                             .C = scratch.O,
                                             .c_stride = columns,
                                             .rows = block.rows,
                                             .depth = tile.count,
                                             .vectors = columns / vector_lanes});
}

template <class T>
inline void decode_keys(const Call& call, const RowBlock& block, DecodeScratch& scratch) {
  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  const bool whole = columns == call.head_dim && columns_v == call.head_dim_v;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += block_kv) {
    const Tile tile = make_tile(call, block, begin);
    if (tile.seen == Seen::none) continue;
    const auto rows_of = [&](const TensorView& tensor) {
      const auto* first = reinterpret_cast<const typename T::Stored*>(block.keys(call, tensor));
      return KeyRows<T>{first + begin * tensor.seq_stride, tensor.seq_stride};
    };
    if (whole && tile.weighted) {
      decode_scores<T>(call, block, tile, rows_of(call.k), rows_of(call.v), scratch);
      decode_values<T>(block, tile, rows_of(call.v), columns_v, scratch);
      continue;
    }
    const FloatRows K = key_rows(call, block, call.k, begin, tile.count, call.head_dim, true, scratch.K);
    const FloatRows V = key_rows(call, block, call.v, begin, tile.count, call.head_dim_v, true, scratch.V);
    const SafeRows safe = make_safe(V, tile.count, columns_v, tile.weighted, scratch.safe);
    decode_scores<Float32>(call, block, tile, {K.data, K.stride}, {V.data, V.stride}, scratch);
    decode_values<Float32>(block, tile, {safe.rows.data, safe.rows.stride}, columns_v, scratch);
    add_odd_rows(safe, scratch.S, {1, block_kv}, block.rows, scratch.O, {columns_v, 1}, call.head_dim_v);
  }
}

inline void decode(const Call& call, std::int64_t item_idx, void* memory) {
  DecodeScratch& scratch = *static_cast<DecodeScratch*>(memory);
  const ForwardItem item(call, item_idx);
  RowBlock block = item.rows(call);
  if (block.rows == 0) return;
  take_split(call, item.split, block);

  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  scratch.statistics.reset();
  for (int i = 0; i < decode_lanes * columns; ++i) scratch.Q[i] = 0;
  for (int i = 0; i < decode_lanes * columns_v; ++i) scratch.O[i] = 0;
  with_element(call.element, [&](auto type) {
    using T = decltype(type);
    for (int row = 0; row < block.rows; ++row) {
      float* Q = scratch.Q + row * columns;
      copy_row<T>(reinterpret_cast<const typename T::Stored*>(block.row(call, call.q, row)), call.head_dim, Q, columns);
      for (int c = 0; c < columns; ++c) Q[c] *= query_factor(call);
    }
    decode_keys<T>(call, block, scratch);
  });

  finish_rows(call, block, item.split, scratch.statistics, scratch.rescale);
  for (int row = 0; row < block.rows; ++row) {
    const auto write = [&](auto type, void* to) {
      using T = decltype(type);
      for (int c = 0; c < call.head_dim_v; c += vector_lanes) {
        const Vec sum = load(scratch.O + row * columns_v + c) * scratch.rescale[row];
        store_some<T>(static_cast<typename T::Stored*>(to) + c, sum, call.head_dim_v - c);
      }
    };
    if (call.num_splits > 1) {
      write(Float32{}, partial_sums(call, item.split, block.row_idx(call, row)));
    } else {
      with_element(call.element, [&](auto type) { write(type, block.row(call, call.out, row)); });
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
