#pragma once

// Forward for a few queries, where reading K and V is all the work: the keys are split over the threads and merged, and the
// query heads of a key head share one reading. Key heads that lie side by side in a row of memory go together, tile by
// tile, so that memory is read in its order; while a tile is worked on, the next one is asked for. With so few rows the
// lanes go along head_dim and along the keys instead:
//
//     S[row][key] = dot(Q[row], K[key])                a square of accumulators, summed across by a butterfly
//     P = 2^(S - row_max), row_sum, rescale            a row at a time
//     O[row]      = rescale * O[row] + sum of P[row][key] * V[key]
//
// K and V are converted in registers on their way into the products.

#include "cpu/generic/decode_products.h"
#include "cpu/generic/decode_scores.h"
#include "cpu/generic/prefill.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_lanes = round_up(decode_rows, vector_lanes);
constexpr int decode_stack = plan::cpu_decode_stack;
constexpr int value_step = 16;  // keys that are summed before the next ones are asked for

struct DecodeScratch {
  alignas(64) float Q[decode_stack * max_head_dim];
  alignas(64) float Q_raw[decode_stack * max_head_dim / 2];
  alignas(64) float O[decode_stack * max_head_dim];
  alignas(64) float S[decode_lanes * block_kv];  // [row][key]
  alignas(64) float keep[block_kv * decode_lanes];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float rescale[block_q];
  DecodeHead heads[decode_stack];
};

/// A unit of work: the rows of some key heads of a batch entry and a part of the keys.
struct DecodeItem {
  std::int64_t batch;
  int first_head, num_heads, split;

  static int heads_together(const Call& call) {
    const bool side_by_side = call.k.head_stride == call.head_dim && call.v.head_stride == call.head_dim_v;
    const std::int64_t key_bytes = std::int64_t{call.heads_kv} * (call.head_dim + call.head_dim_v) * size_of(call.element);
    return plan::cpu_decode_heads(call.group * call.seq_q, call.heads_kv, call.seq_kv, key_bytes, side_by_side);
  }
  static std::int64_t groups(const Call& call) { return ceil_div(call.heads_kv, heads_together(call)); }

  DecodeItem(const Call& call, std::int64_t item) {
    split = static_cast<int>(item % call.num_splits);
    item /= call.num_splits;
    const int together = heads_together(call);
    first_head = static_cast<int>(item % groups(call)) * together;
    num_heads = smaller(together, call.heads_kv - first_head);
    batch = item / groups(call);
  }
};

inline std::int64_t decode_items(const Call& call) {
  return call.heads_kv == 0 ? 0 : call.batch * DecodeItem::groups(call) * call.num_splits;
}

/// P in place, over whole vectors: what is past the keys becomes 0.
inline void softmax_row(int row, int keys, Statistics& statistics, DecodeScratch& scratch) {
  float* S = scratch.S + row * block_kv;
  const int padded = round_up(keys, vector_lanes);
  for (int key = keys; key < padded; ++key) S[key] = -infinity;
  const float old_max = statistics.row_max[row];
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
  statistics.row_max[row] = row_max;
  statistics.row_sum[row] = statistics.row_sum[row] * factor + sum_lanes(sum);
}

template <class Dots>
inline void decode_scores(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<typename Dots::Element> K,
                          DecodeHead& head, DecodeScratch& scratch, NextTile& next) {
  dot_rows<Dots>(block.rows, K, tile.count, Dots::query(head), call.head_dim, query_factor(call), scratch.S, next);
  finish_scores_in_rows(call, block, tile, scratch.S);
  for (int row = 0; row < block.rows; ++row) softmax_row(row, tile.count, head.statistics, scratch);
  if (!call.dropout) return;
  dropout_factors(call, block, tile, scratch.keep);
  for (int row = 0; row < block.rows; ++row) {
    for (int key = 0; key < tile.count; ++key) scratch.S[row * block_kv + key] *= scratch.keep[key * block.lanes() + row];
  }
}

template <class Dots>
inline void decode_values(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<typename Dots::Element> V,
                          float* O, DecodeScratch& scratch, NextTile& next) {
  const int width = round_up(call.head_dim_v, vector_lanes);
  for (int row = 0; row < block.rows; ++row) {
    if (scratch.rescale[row] == 1.0f) continue;
    float* sum = O + row * width;
    for (int c = 0; c < width; c += vector_lanes) store(sum + c, load(sum + c) * scratch.rescale[row]);
  }
  Dots::prepare_weights(block.rows, tile.count, scratch.S);
  for (int key = 0; key < tile.count; key += value_step) {
    next.ask_for_values();
    Dots::add_values(block.rows, scratch.S, V, key, smaller(tile.count - key, value_step), O, call.head_dim_v);
  }
}

/// One tile of one key head. K and V are used as they lie, but for values that must not meet a weight of 0 (hidden.h).
template <class Dots>
inline void decode_tile(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head, DecodeScratch& scratch,
                        NextTile& next) {
  using T = typename Dots::Element;
  if constexpr (!Dots::any_width) {
    const bool fits = call.head_dim % Dots::columns == 0 && call.head_dim_v % Dots::columns == 0;
    if (!fits) return decode_tile<FloatDots<T>>(call, block, tile, head, scratch, next);
  }
  const auto rows_of = [&](const TensorView& tensor) {
    const auto* first = reinterpret_cast<const typename T::Stored*>(block.keys(call, tensor));
    return KeyRows<T>{first + tile.begin * tensor.seq_stride, tensor.seq_stride};
  };
  decode_scores<Dots>(call, block, tile, rows_of(call.k), head, scratch, next);
  const KeyRows<T> V = rows_of(call.v);
  if (tile.weighted || are_finite<T>(V.data, V.stride, tile.count, call.head_dim_v)) {
    return decode_values<Dots>(call, block, tile, V, head.O, scratch, next);
  }
  const FloatRows copy = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  const SafeRows safe = make_safe(copy, tile.count, call.head_dim_v, false, scratch.safe);
  decode_values<FloatDots<Float32>>(call, block, tile, {safe.rows.data, safe.rows.stride}, head.O, scratch, next);
  add_odd_rows(safe, scratch.S, {1, block_kv}, block.rows, head.O, {round_up(call.head_dim_v, vector_lanes), 1},
               call.head_dim_v);
}

/// All tiles of all key heads of the item: tile by tile, and in a tile head by head.
template <class Dots>
inline void decode_keys(const Call& call, const DecodeItem& item, RowBlock& block, DecodeScratch& scratch) {
  constexpr int bytes_ahead = 64 << 10;  // of K, and of V; with 8 heads 10 % faster on a Zen 4 than 32 KB
  const int size = size_of(call.element), width = item.num_heads * call.head_dim * size;
  const int width_v = item.num_heads * call.head_dim_v * size;
  const int most = smaller(larger(bytes_ahead / width / 16 * 16, 16), block_kv);
  const auto lines = [&](int row_bytes, std::int64_t steps) {
    return static_cast<int>(ceil_div(most * ((row_bytes + 63) / 64), steps * item.num_heads));
  };
  const int key_lines = lines(width, ceil_div(most * block.rows, vector_lanes));
  const int value_lines = lines(width_v, ceil_div(most, value_step));
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += most) {
    block.move_to(call, item.first_head);
    const auto ahead = [&](const TensorView& tensor, int columns) {
      return rows_ahead(call, block, tensor, columns, item.num_heads, begin + most, begin + 2 * most);
    };
    NextTile next{ahead(call.k, call.head_dim), ahead(call.v, call.head_dim_v), key_lines, value_lines};
    for (int h = 0; h < item.num_heads; ++h) {
      block.move_to(call, item.first_head + h);
      const Tile tile(call, block, begin, most);
      if (tile.seen != Seen::none) decode_tile<Dots>(call, block, tile, scratch.heads[h], scratch, next);
    }
  }
}

/// Q of the block's head; O and the statistics at their start. rows: with their padding.
template <class Dots>
inline void start_head(const Call& call, const RowBlock& block, int rows, DecodeHead& head) {
  using T = typename Dots::Element;
  const int columns = round_up(call.head_dim, vector_lanes), columns_v = round_up(call.head_dim_v, vector_lanes);
  head.statistics.reset();
  for (int i = block.rows * columns; i < rows * columns; i += vector_lanes) store(head.Q + i, Vec{});
  for (int i = 0; i < rows * columns_v; i += vector_lanes) store(head.O + i, Vec{});
  for (int row = 0; row < block.rows; ++row) {
    const auto* from = reinterpret_cast<const typename T::Stored*>(block.row(call, call.q, row));
    copy_row<T>(from, call.head_dim, head.Q + row * columns, columns);
    if constexpr (Dots::columns != vector_lanes) Dots::copy_query(from, call.head_dim, head.Q_raw + row * columns / 2);
  }
}

template <class Dots>
inline void decode_with(const Call& call, std::int64_t item_idx, void* memory) {
  DecodeScratch& scratch = *static_cast<DecodeScratch*>(memory);
  const DecodeItem item(call, item_idx);
  RowBlock block(call, item.batch, item.first_head * call.group, call.group, 0);
  if (block.rows == 0) return;
  take_split(call, item.split, value_step, block);

  const int rows = plan::cpu_decode_padded(block.rows);
  for (int h = 0; h < item.num_heads; ++h) {
    DecodeHead& head = scratch.heads[h];
    head.Q = scratch.Q + h * rows * round_up(call.head_dim, vector_lanes);
    head.Q_raw = scratch.Q_raw + h * rows * round_up(call.head_dim, vector_lanes) / 2;
    head.O = scratch.O + h * rows * round_up(call.head_dim_v, vector_lanes);
    block.move_to(call, item.first_head + h);
    start_head<Dots>(call, block, rows, head);
  }
  decode_keys<Dots>(call, item, block, scratch);
  for (int h = 0; h < item.num_heads; ++h) {
    block.move_to(call, item.first_head + h);
    write_rows(call, block, item.split, scratch.heads[h].statistics, scratch.heads[h].O, scratch.rescale);
  }
}

inline void decode(const Call& call, std::int64_t item, void* memory) {
  with_element(call.element, [&](auto type) { decode_with<FloatDots<decltype(type)>>(call, item, memory); });
}

}  // namespace
}  // namespace flash_attention::cpu
