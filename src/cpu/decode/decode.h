#pragma once

// Forward for a few queries, where reading K and V is all the work: the keys are split over the threads and merged, and the
// query heads of a key head share one reading. Key heads that are side by side in a row of memory go together, tile by
// tile, so that memory is read in its order; while a tile is worked on, the next one is prefetched. With so few rows the
// lanes go along head_dim and along the keys instead:
//
//     S[row][key] = dot(Q[row], K[key])                a square of accumulators, summed across by a butterfly; eight_rows.h
//     P = 2^(S - row_max), row_sum, rescale            some rows at a time
//     O[row]      = rescale * O[row] + sum of P[row][key] * V[key]
//
// K and V are converted in registers before the products.

#include "cpu/decode/decode_scores.h"
#include "cpu/decode/eight_rows.h"
#include "cpu/prefill/prefill.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_lanes = round_up(smaller(plan::cpu_decode_rows, block_q), vector_lanes);
constexpr int decode_stack = plan::cpu_decode_stack;

/// Rows that the products work on.
inline int padded_rows(const RowBlock& block) { return plan::cpu_decode_padded(block.rows); }

/// Keys that are summed before the next ones are prefetched: with many rows, the sums are better left in registers.
constexpr int value_step(int rows) { return rows < 8 ? 16 : 32; }

struct DecodeScratch {
  alignas(64) float Q[decode_stack * max_head_dim];
  alignas(64) float Q_raw[decode_stack * max_head_dim / 2];
  alignas(64) float O[decode_stack * max_head_dim];
  alignas(64) float S[decode_lanes * block_kv];  // [row][key]
  alignas(64) float keep[block_kv * decode_lanes];
  alignas(64) float V[block_kv * max_head_dim];
  alignas(64) float safe[block_kv * max_head_dim];
  alignas(64) float gathered[2][block_kv * max_head_dim];  // rows of K and of V from several pages
  alignas(64) float rescale[block_q];
  DecodeHead heads[decode_stack];
};

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

/// P in place for some rows, over whole vectors: what is past the keys becomes 0. Statistics go along the rows.
template <int rows>
inline void softmax_rows(int row, int keys, Statistics& statistics, DecodeScratch& scratch) {
  float* S = scratch.S + row * block_kv;
  const int padded = round_up(keys, vector_lanes);
  Vec largest[rows], sum[rows] = {};
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    for (int key = keys; key < padded; ++key) S[r * block_kv + key] = -infinity;
    largest[r] = splat(-infinity);
    for (int key = 0; key < padded; key += vector_lanes) {
      largest[r] = max(load(S + r * block_kv + key), largest[r]);
    }
  }
  const Vec old_max = load_some<Float32>(statistics.row_max + row, rows);
  const Vec row_max = max(reduce_each<Largest>(largest), old_max);
  const Vec origin = select(row_max == -infinity, Vec{}, row_max);
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) {
    for (int key = 0; key < padded; key += vector_lanes) {
      const Vec p = exp2(load(S + r * block_kv + key) - origin[r]);
      store(S + r * block_kv + key, p);
      sum[r] += p;
    }
  }
  const Vec factor = exp2(old_max - origin);
  const Vec row_sum = load_some<Float32>(statistics.row_sum + row, rows) * factor + reduce_each<Sum>(sum);
  store_some<Float32>(scratch.rescale + row, factor, rows);
  store_some<Float32>(statistics.row_max + row, row_max, rows);
  store_some<Float32>(statistics.row_sum + row, row_sum, rows);
}

/// Scores, or probabilities, times the scales of the keys. What is 0 stays so: a hidden key's scale may be NaN.
inline void scale_keys(const Call& call, const RowBlock& block, const Tile& tile, const ScaleView& scales, float* S) {
  alignas(64) float factor[block_kv + vector_lanes] = {};
  for (int key = 0; key < tile.count; ++key) factor[key] = scale_of_key(call, block, scales, tile.begin + key);
  for (int row = 0; row < block.rows; ++row, S += block_kv) {
    change_row(S, tile.count, [&](int key, Vec s) { return select(s == 0.0f, s, s * load(factor + key)); });
  }
}

template <class Dots>
inline void decode_scores(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<typename Dots::Element> K,
                          DecodeHead& head, DecodeScratch& scratch, NextTile& next) {
  const float* Q = Dots::query(head);
  const float factor = query_factor(call) * scale_of_head(call, block, call.k_scale);
  for_row_groups<8>(padded_rows(block), [&]<int group>(int row) {
    const float* rows = Q + row * words_of<Dots>(call.head_dim);
    float* S = scratch.S + row * block_kv;
    if constexpr (group == 8) {
      dot_eight_rows<Dots>(K, tile.count, rows, call.head_dim, factor, S, next);
    } else {
      dot_tile<group, Dots>(K, tile.count, rows, call.head_dim, factor, S, next);
    }
  });
  if (call.token_scales) scale_keys(call, block, tile, call.k_scale, scratch.S);
  finish_scores_in_rows(call, block, tile, scratch.S);
  for_row_groups<4>(padded_rows(block),
                    [&]<int group>(int row) { softmax_rows<group>(row, tile.count, head.statistics, scratch); });
  if (call.dropout) {
    dropout_factors(call, block, tile, scratch.keep);
    for (int row = 0; row < block.rows; ++row) {
      for (int key = 0; key < tile.count; ++key) scratch.S[row * block_kv + key] *= scratch.keep[key * block.lanes() + row];
    }
  }
  if (call.token_scales) scale_keys(call, block, tile, call.v_scale, scratch.S);
}

template <class Dots>
inline void decode_values(const Call& call, const RowBlock& block, const Tile& tile, KeyRows<typename Dots::Element> V,
                          float* O, DecodeScratch& scratch, NextTile& next) {
  const int width = round_up(call.head_dim_v, vector_lanes), rows = padded_rows(block), step = value_step(rows);
  for (int row = 0; row < rows; ++row) {
    if (scratch.rescale[row] == 1.0f) continue;
    float* sum = O + row * width;
    for (int c = 0; c < width; c += vector_lanes) store(sum + c, load(sum + c) * scratch.rescale[row]);
  }
  Dots::prepare_weights(rows, tile.count, scratch.S);
  for (int key = 0; key < tile.count; key += step) {
    next.prefetch_values();
    Dots::add_values(rows, scratch.S, V, key, smaller(tile.count - key, step), O, call.head_dim_v);
  }
}

/// The rows of a tile where they are, or copied together where they are in several pages. The rows of the next tile are
/// prefetched meanwhile: which they are only the table says.
template <class T>
inline KeyRows<T> rows_of_tile(const Call& call, const RowBlock& block, const Tile& tile, const TensorView& tensor,
                               int columns, float* buffer) {
  using Stored = typename T::Stored;
  if (is_narrow(call.key_element)) {
    auto* converted = reinterpret_cast<Stored*>(buffer);
    if constexpr (only_bfloat16) {
      if (columns % 32 == 0 && block.keys_together(call, tile.begin) >= tile.count) {
        const char* first = block.key_row(call, tensor, tile.begin);
        codes_to_bfloat16(static_cast<int>(call.key_element), reinterpret_cast<const std::uint8_t*>(first),
                          tensor.seq_stride, tile.count, columns, converted);
        return {converted, columns};
      }
    }
    for (int key = 0; key < tile.count; ++key) {
      const char* row = block.key_row(call, tensor, tile.begin + key);
      convert_codes<T>(call.key_element, reinterpret_cast<const std::uint8_t*>(row), columns, converted + key * columns);
    }
    return {converted, columns};
  }
  const auto row_of = [&](std::int64_t j) { return reinterpret_cast<const Stored*>(block.key_row(call, tensor, j)); };
  if (block.keys_together(call, tile.begin) >= tile.count) return {row_of(tile.begin), tensor.seq_stride};
  auto* copy = reinterpret_cast<Stored*>(buffer);
  for (int key = 0; key < tile.count; ++key) {
    const std::int64_t j = tile.begin + key, ahead = j + tile.count;
    if (ahead < block.key_end) {
      const char* row = reinterpret_cast<const char*>(row_of(ahead));
      for (int at = 0; at < columns * int{sizeof(Stored)}; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    __builtin_memcpy(copy + key * columns, row_of(j), columns * sizeof(Stored));
  }
  return {copy, columns};
}

/// One tile of one key head. K and V are used as they are, but for values that must not meet a weight of 0 (hidden.h).
template <class Dots>
inline void decode_tile(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head, DecodeScratch& scratch,
                        NextTile& next) {
  using T = typename Dots::Element;
  if constexpr (!Dots::any_width) {
    const bool fits = call.head_dim % Dots::columns == 0 && call.head_dim_v % Dots::columns == 0;
    if (!fits) return decode_tile<FloatDots<T>>(call, block, tile, head, scratch, next);
  }
  const KeyRows<T> K = rows_of_tile<T>(call, block, tile, call.k, call.head_dim, scratch.gathered[0]);
  decode_scores<Dots>(call, block, tile, K, head, scratch, next);
  const KeyRows<T> V = rows_of_tile<T>(call, block, tile, call.v, call.head_dim_v, scratch.gathered[1]);
  if (tile.weighted || are_finite<T>(V.data, V.stride, tile.count, call.head_dim_v)) {
    return decode_values<Dots>(call, block, tile, V, head.O, scratch, next);
  }
  const int width = round_up(call.head_dim_v, vector_lanes);
  for (int key = 0; key < tile.count; ++key)
    copy_row<T>(V.data + key * V.stride, call.head_dim_v, scratch.V + key * width, width);
  const SafeRows safe = make_safe({scratch.V, width}, tile.count, call.head_dim_v, false, scratch.safe);
  decode_values<FloatDots<Float32>>(call, block, tile, {safe.rows.data, safe.rows.stride}, head.O, scratch, next);
  add_nonfinite_rows(safe, scratch.S, {1, block_kv}, block.rows, head.O, {width, 1}, call.head_dim_v);
}

/// All tiles of all key heads of the item: tile by tile, and in a tile head by head.
template <class Dots>
inline void decode_keys(const Call& call, const DecodeItem& item, RowBlock& block, DecodeScratch& scratch) {
  constexpr int bytes_ahead = 64 << 10;  // of K, and of V; with 8 heads 10 % faster on a Zen 4 than 32 KB
  // A tile of 8-bit keys has as many as one of 16-bit keys: the same bits.
  const int size = size_of(call.key_element), width = item.num_heads * call.head_dim * size;
  const int width_v = item.num_heads * call.head_dim_v * size;
  const int wide_bytes = item.num_heads * call.head_dim * size_of(call.element);
  const int most = smaller(larger(bytes_ahead / wide_bytes / 16 * 16, 16), block_kv);
  const auto lines = [&](int row_bytes, std::int64_t steps) {
    return static_cast<int>(ceil_div(most * ((row_bytes + 63) / 64), steps * item.num_heads));
  };
  const int key_lines = lines(width, ceil_div(most * padded_rows(block), vector_lanes));
  const int value_lines = lines(width_v, ceil_div(most, value_step(padded_rows(block))));
  const bool asks = exceeds_cache(call);
  // A tile ends with its page where that leaves it some keys: used where they are, 16 are faster than 64 that are copied.
  const bool ends_with_page = call.page_size >= 16 && call.page_size % 16 == 0;
  std::int64_t count = 0;
  for (std::int64_t begin = block.key_begin; begin < block.key_end; begin += count) {
    count = ends_with_page ? smaller<std::int64_t>(most, block.keys_together(call, begin)) : most;
    block.move_to(call, item.first_head);
    const auto ahead = [&](const TensorView& tensor, int columns) {
      return prefetch_of_rows(call, block, tensor, columns, item.num_heads, begin + count, asks ? begin + count + most : 0);
    };
    NextTile next{ahead(call.k, call.head_dim), ahead(call.v, call.head_dim_v), key_lines, value_lines};
    for (int h = 0; h < item.num_heads; ++h) {
      block.move_to(call, item.first_head + h);
      const Tile tile(call, block, begin, static_cast<int>(count));
      if (tile.seen != Seen::none) decode_tile<Dots>(call, block, tile, scratch.heads[h], scratch, next);
    }
  }
}

/// Q as decode_scores takes it. buffer: for eight rows.
template <class Dots>
inline void copy_query(const Call& call, const RowBlock& block, float* Q, float* buffer) {
  const int stride = words_of<Dots>(call.head_dim);
  for_row_groups<8>(padded_rows(block), [&]<int group>(int first) {
    float* rows = group == 8 ? buffer : Q + first * stride;
    for (int row = 0; row < group; ++row) {
      const char* from = block.row(call, call.q, smaller(first + row, block.rows - 1));  // padding repeats the last
      Dots::copy_words(reinterpret_cast<const typename Dots::Element::Stored*>(from), call.head_dim, rows + row * stride);
    }
    if constexpr (group == 8) pack_eight_rows(rows, stride, Q + first * stride);
  });
}

/// Q of the block's head; O and the statistics at their start.
template <class Dots>
inline void start_head(const Call& call, const RowBlock& block, DecodeHead& head, float* buffer) {
  using T = typename Dots::Element;
  const int columns_v = round_up(call.head_dim_v, vector_lanes);
  head.statistics.reset();
  for (int i = 0; i < padded_rows(block) * columns_v; i += vector_lanes) store(head.O + i, Vec{});
  copy_query<FloatDots<T>>(call, block, head.Q, buffer);
  if constexpr (!Dots::any_width) copy_query<Dots>(call, block, head.Q_raw, buffer);
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
    const int size = padded_rows(block) * round_up(call.head_dim_v, vector_lanes);
    for (int i = 0; scale != 1 && i < size; i += vector_lanes)
      store(scratch.heads[h].O + i, load(scratch.heads[h].O + i) * scale);
    write_rows(call, block, item.split, scratch.heads[h].statistics, scratch.heads[h].O,
               round_up(call.head_dim_v, vector_lanes), scratch.rescale);
  }
}

inline void decode(const Call& call, std::int64_t item, void* memory) {
  with_element(call.element, [&](auto type) { decode_with<FloatDots<decltype(type)>>(call, item, memory); });
}

}  // namespace
}  // namespace flash_attention::cpu
