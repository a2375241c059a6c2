#pragma once

// Forward for a few queries: reading K and V is nearly all of the work. The keys are split over the threads and merged,
// and the query heads of a key head share one reading. Key heads that are adjacent in memory are processed together,
// tile by tile, so that memory is read in order. While a tile is processed, the next one is prefetched. With so few
// rows, lanes go along head_dim and along the keys:
//
//     S[row][key] = dot(Q[row], K[key])                a square of accumulators, summed across by a butterfly; eight_rows.h
//     P = 2^(S - row_max), row_sum, rescale            some rows at a time
//     O[row]      = rescale * O[row] + sum of P[row][key] * V[key]
//
// K and V are converted in registers before the products.

#include "cpu/decode/decode_rows.h"
#include "cpu/decode/decode_weights.h"
#include "cpu/decode/eight_rows.h"

namespace flash_attention::cpu {
namespace {

/// Keys that are summed before the next ones are prefetched. With many rows it is better to keep the sums in registers.
constexpr int value_step(int rows) { return rows < 8 ? 16 : 32; }

/// A unit of work: the rows of some key heads of a batch entry and a part of the keys.
struct DecodeItem {
  std::int64_t batch;
  int first_head, num_heads, split;

  static std::int64_t groups(const Call& call) { return ceil_div(call.heads_kv, call.heads_together); }

  DecodeItem(const Call& call, std::int64_t item) {
    split = static_cast<int>(item % call.num_splits);
    item /= call.num_splits;
    first_head = static_cast<int>(item % groups(call)) * call.heads_together;
    num_heads = smaller(call.heads_together, call.heads_kv - first_head);
    batch = item / groups(call);
  }
};

inline std::int64_t decode_items(const Call& call) {
  return call.heads_kv == 0 ? 0 : call.batch * DecodeItem::groups(call) * call.num_splits;
}

template <class Dots>
inline void decode_scores(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head,
                          DecodeScratch& scratch, NextTile& next) {
  const float* Q = Dots::query(head);
  const float factor = query_factor(call) * scale_of_head(call, block, call.k_scale);
  using Keys = typename Dots::Keys;
  const auto dot_run = [&](int first, KeyRows<Keys> K, int count) {
    for_row_groups<Dots::max_rows>(padded_rows(block), [&]<int group>(int row) {
      const float* rows = Q + row * words_of<Dots>(call.head_dim);
      float* S = scratch.S + row * block_kv + first;
      if constexpr (group == 8) {
        dot_eight_rows<Dots>(K, count, rows, call.head_dim, factor, S, next);
      } else {
        dot_tile<group, Dots>(K, count, rows, call.head_dim, factor, S, next);
      }
    });
  };
  for_key_runs<Keys>(call, block, tile, call.k, call.head_dim, scratch.gathered[0], dot_run);
  exponentiate_keys(call, block, tile, head, scratch);
}

inline void rescale_sums(int rows, int width, const float* rescale, float* O) {
  for (int row = 0; row < rows; ++row, O += width) {
    if (rescale[row] == 1.0f) continue;
    for (int c = 0; c < width; c += vector_lanes) store(O + c, load(O + c) * rescale[row]);
  }
}

/// O += P V for some keys of a tile, from `first` on.
template <class Dots>
inline void add_run(int rows, int first, KeyRows<typename Dots::Keys> V, int count, int head_dim_v, float* O,
                    DecodeScratch& scratch, NextTile& next) {
  const int step = value_step(rows);
  for (int key = 0; key < count; key += step) {
    next.prefetch_values();
    Dots::add_values(rows, Dots::weights_at(scratch.S, first + key), {V.data + key * V.stride, V.stride},
                     smaller(count - key, step), O, head_dim_v);
  }
}

/// O += P V. V is used in place, except values that must not be multiplied by a weight of 0 (hidden.h).
template <class Dots>
inline void attend_values(const Call& call, const RowBlock& block, const Tile& tile, float* O, DecodeScratch& scratch,
                          NextTile& next) {
  using T = typename Dots::Keys;
  const int width = round_up(call.head_dim_v, vector_lanes), rows = padded_rows(block);
  const auto for_values = [&](auto visit) {
    for_key_runs<T>(call, block, tile, call.v, call.head_dim_v, scratch.gathered[1], visit);
  };
  rescale_sums(rows, width, scratch.rescale, O);
  bool safe_as_they_are = true;
  if (!tile.weighted) {
    for_values([&](int, KeyRows<T> V, int count) {
      safe_as_they_are = safe_as_they_are && are_finite<T>(V.data, V.stride, count, call.head_dim_v);
    });
  }
  if (safe_as_they_are) {
    Dots::prepare_weights(rows, tile.count, scratch.S);
    for_values([&](int first, KeyRows<T> V, int count) {
      add_run<Dots>(rows, first, V, count, call.head_dim_v, O, scratch, next);
    });
    return;
  }
  for_values([&](int first, KeyRows<T> V, int count) {
    for (int key = 0; key < count; ++key)
      copy_row<T>(V.data + key * V.stride, call.head_dim_v, scratch.V + (first + key) * width, width);
  });
  const SafeRows safe = make_safe({scratch.V, width}, tile.count, call.head_dim_v, false, scratch.safe);
  add_run<FloatDots<Float32>>(rows, 0, {safe.rows.data, safe.rows.stride}, tile.count, call.head_dim_v, O, scratch, next);
  add_nonfinite_rows(safe, scratch.S, {1, block_kv}, block.rows, O, {width, 1}, call.head_dim_v);
}

/// Processes one tile of one key head.
template <class Dots>
inline void decode_tile(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head, DecodeScratch& scratch,
                        NextTile& next) {
  decode_scores<Dots>(call, block, tile, head, scratch, next);
  attend_values<Dots>(call, block, tile, head.O, scratch, next);
}

/// Processes all tiles of all key heads of the item: tile by tile, and within a tile head by head.
template <class Dots>
inline void decode_keys(const Call& call, const DecodeItem& item, RowBlock& block, DecodeScratch& scratch) {
  constexpr int bytes_ahead = 64 << 10;  // of K, and of V; with 8 heads 10 % faster on a Zen 4 than 32 KB
  // A tile of 8-bit keys has as many keys as one of 16-bit keys, on every instruction set, so results have the same
  // bits.
  const int width = static_cast<int>(key_bytes(call, item.num_heads * call.head_dim));
  const int width_v = static_cast<int>(key_bytes(call, item.num_heads * call.head_dim_v));
  const int wide_bytes = item.num_heads * call.head_dim * bytes_of(call.dtype);
  const int most = smaller(larger(bytes_ahead / wide_bytes / 16 * 16, 16), plan::cpu_block_kv);
  const auto lines = [&](int row_bytes, std::int64_t steps) {
    return static_cast<int>(ceil_div(most * ((row_bytes + 63) / 64), steps * item.num_heads));
  };
  const int key_lines = lines(width, ceil_div(most * padded_rows(block), vector_lanes));
  const int value_lines = lines(width_v, ceil_div(most, value_step(padded_rows(block))));
  const bool asks = exceeds_cache(call);
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += most) {
    block.move_to(call, item.first_head);
    const auto ahead = [&](const TensorView& tensor, int columns) {
      return prefetch_of_rows(call, block, tensor, columns, item.num_heads, begin + most, asks ? begin + 2 * most : 0);
    };
    NextTile next{ahead(call.k, call.head_dim), ahead(call.v, call.head_dim_v), key_lines, value_lines};
    for (int h = 0; h < item.num_heads; ++h) {
      block.move_to(call, item.first_head + h);
      const Tile tile(call, block, begin, most);
      if (tile.seen != Seen::none) decode_tile<Dots>(call, block, tile, scratch.heads[h], scratch, next);
    }
  }
}

/// Q in the form that decode_scores takes. buffer: for eight rows.
template <class Dots>
inline void copy_query(const Call& call, const RowBlock& block, float* Q, float* buffer) {
  const int stride = words_of<Dots>(call.head_dim);
  for_row_groups<Dots::max_rows>(padded_rows(block), [&]<int group>(int first) {
    float* rows = group == 8 ? buffer : Q + first * stride;
    for (int row = 0; row < group; ++row) {
      const char* from = block.row(call, call.q, smaller(first + row, block.rows - 1));  // padding repeats the last row
      Dots::copy_query(call, from, rows + row * stride);
    }
    if constexpr (group == 8) pack_eight_rows(rows, stride, Q + first * stride);
  });
}

/// Loads Q of the block's head, and initialises O and the statistics.
template <class Dots>
inline void start_head(const Call& call, const RowBlock& block, DecodeHead& head, float* buffer) {
  const int columns_v = round_up(call.head_dim_v, vector_lanes);
  head.statistics.reset();
  for (int i = 0; i < padded_rows(block) * columns_v; i += vector_lanes) store(head.O + i, Vec{});
  copy_query<FloatDots<Float32>>(call, block, head.Q, buffer);
  if constexpr (Dots::raw_query) copy_query<Dots>(call, block, head.Q_raw, buffer);
}

template <class Dots>
inline void decode_with(const Call& call, std::int64_t item_idx, void* memory) {
  DecodeScratch& scratch = *static_cast<DecodeScratch*>(memory);
  const DecodeItem item(call, item_idx);
  RowBlock block(call, item.batch, item.first_head * call.group, call.group, 0);
  if (block.rows == 0) return;
  take_split(call, item.split, 16, block);

  for (int h = 0; h < item.num_heads; ++h) {
    DecodeHead& head = scratch.heads[h];
    head.Q = scratch.Q + h * padded_rows(block) * round_up(call.head_dim, vector_lanes);
    head.Q_raw = scratch.Q_raw + h * padded_rows(block) * round_up(call.head_dim, 2 * vector_lanes) / 2;
    head.O = scratch.O + h * padded_rows(block) * round_up(call.head_dim_v, vector_lanes);
    block.move_to(call, item.first_head + h);
    start_head<Dots>(call, block, head, scratch.V);
  }
  decode_keys<Dots>(call, item, block, scratch);
  for (int h = 0; h < item.num_heads; ++h) {
    block.move_to(call, item.first_head + h);
    const float scale = scale_of_head(call, block, call.v_scale);
    const int width = round_up(call.head_dim_v, vector_lanes), size = padded_rows(block) * width;
    float* O = scratch.heads[h].O;
    for (int i = 0; scale != 1 && i < size; i += vector_lanes) store(O + i, load(O + i) * scale);
    write_rows(call, block, item.split, scratch.heads[h].statistics, O, width, scratch.rescale);
  }
}

inline void decode_by_floats(const Call& call, std::int64_t item, void* memory) {
  const bool done =
      with_codes(call.kv_dtype, [&](auto type) { decode_with<FloatDots<decltype(type)>>(call, item, memory); });
  if (done) return;
  with_element(call.dtype, [&](auto type) { decode_with<FloatDots<decltype(type)>>(call, item, memory); });
}

}  // namespace
}  // namespace flash_attention::cpu
