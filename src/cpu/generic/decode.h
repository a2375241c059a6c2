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
// K and V are converted in registers on their way into the products. The options of a score work on S^T, as in prefill.

#include "cpu/generic/ahead.h"
#include "cpu/generic/prefill.h"

namespace flash_attention::cpu {
namespace {

constexpr int decode_rows = plan::cpu_decode_rows;
constexpr int decode_lanes = round_up(decode_rows, vector_lanes);
constexpr int decode_stack = plan::cpu_decode_stack;
constexpr int value_step = 16;  // keys that are summed before the next ones are asked for

/// A key head's part of the work.
struct DecodeHead {
  float* Q;      // [rows][columns], with room for a whole group of dot_tile
  float* Q_raw;  // the same in the tensor's type, where Dots takes them so
  float* O;      // [rows][columns_v]
  Statistics statistics;
};

struct DecodeScratch {
  alignas(64) float Q[decode_stack * max_head_dim];
  alignas(64) float Q_raw[decode_stack * max_head_dim / 2];
  alignas(64) float O[decode_stack * max_head_dim];
  alignas(64) float S[decode_lanes * block_kv];   // [row][key]
  alignas(64) float St[block_kv * decode_lanes];  // [key][lane]
  alignas(64) float keep[block_kv * decode_lanes];
  alignas(64) float K[block_kv * max_head_dim];
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
    return plan::cpu_decode_heads(call.group * call.seq_q, call.heads_kv, side_by_side);
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

/// Rows of keys as they lie in memory.
template <class T>
struct KeyRows {
  const typename T::Stored* data;
  std::int64_t stride;
};

/// How rows of T are multiplied: converted to float.
template <class T>
struct FloatDots {
  using Element = T;
  static constexpr int columns = vector_lanes;  // of a vector
  static constexpr bool any_width = true;       // head_dim need not be a multiple of that
  static const float* query(const DecodeHead& head) { return head.Q; }
  static FLASH_ATTENTION_INLINE Vec load_row(const typename T::Stored* from) { return T::load(from); }
  static FLASH_ATTENTION_INLINE Vec load_end(const typename T::Stored* from, int count) {
    return load_some<T>(from, count);
  }
  static FLASH_ATTENTION_INLINE Vec add(Vec sum, Vec key, Vec query) { return sum + key * query; }

  static void prepare_weights(int /*rows*/, int /*keys*/, float* /*P*/) {}

  /// O[row] += sum of P[row][key] * V[key] over `keys` keys from `first` on. O has rows of whole vectors.
  static void add_values(int rows, const float* P, KeyRows<T> V, int first, int keys, float* O, int head_dim) {
    const int width = round_up(head_dim, vector_lanes), whole = head_dim / vector_lanes;
    P += first;
    V.data += first * V.stride;
    multiply<Start::add, Order::row_major, T>({.A = P,
                                               .a_stride = block_kv,
                                               .B = V.data,
                                               .b_stride = V.stride,
                                               .C = O,
                                               .c_stride = width,
                                               .rows = rows,
                                               .depth = keys,
                                               .vectors = whole});
    const int at = whole * vector_lanes;
    if (at == head_dim) return;
    V.data += at;
    if (rows == 1) return add_ends<1>(P, V, keys, O + at, width, head_dim - at);
    if (rows == 2) return add_ends<2>(P, V, keys, O + at, width, head_dim - at);
    for (int row = 0; row < rows; row += 4) {
      add_ends<4>(P + row * block_kv, V, keys, O + row * width + at, width, head_dim - at);
    }
  }

 private:
  /// The columns after the last whole vector, for some rows, or for one row in sums that do not wait for each other. (O has
  /// rows for 1, 2 or a multiple of 4 of them.)
  template <int rows>
  static void add_ends(const float* P, KeyRows<T> V, int keys, float* O, int width, int columns) {
    Vec sum[4] = {};
    for (int key = 0; key < keys; ++key, V.data += V.stride) {
      const Vec values = load_end(V.data, columns);
      if constexpr (rows == 1) {
        sum[0] = sum[1] + values * P[key];
        sum[1] = sum[2], sum[2] = sum[3], sum[3] = sum[0];
      } else {
        FLASH_ATTENTION_UNROLL
        for (int r = 0; r < rows; ++r) sum[r] += values * P[r * block_kv + key];
      }
    }
    if constexpr (rows == 1) sum[0] = sum[1] + sum[2] + sum[3];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) store(O + r * width, load(O + r * width) + sum[r]);
  }
};

/// S[r][j] = factor * dot(K[j], Q[r]) for r < rows and as many keys as make a vector of sums. Q has rows of whole vectors,
/// with 0 after head_dim.
template <int rows, class Dots>
FLASH_ATTENTION_INLINE void dot_square(KeyRows<typename Dots::Element> K, const float* Q, int head_dim, float factor,
                                       float* S) {
  using Stored = typename Dots::Element::Stored;
  constexpr int step = vector_lanes / rows, run = smaller(step, 4);
  const int q_stride = round_up(head_dim, Dots::columns) / Dots::columns * vector_lanes;
  const Stored* first[step / run];  // of every fourth row: a register for each row is too many
  FLASH_ATTENTION_UNROLL
  for (int i = 0; i < step / run; ++i) first[i] = K.data + i * run * K.stride;
  Vec sum[vector_lanes] = {};
  const auto add_columns = [&](auto load_row) {
    Vec q[rows];
    FLASH_ATTENTION_UNROLL
    for (int r = 0; r < rows; ++r) q[r] = load(Q + r * q_stride);
    FLASH_ATTENTION_UNROLL
    for (int j = 0; j < step; ++j) {
      const Vec values = load_row(first[j / run] + j % run * K.stride);
      FLASH_ATTENTION_UNROLL
      for (int r = 0; r < rows; ++r) sum[r * step + j] = Dots::add(sum[r * step + j], values, q[r]);
    }
  };
  int column = 0;
  for (; column + Dots::columns <= head_dim; column += Dots::columns, Q += vector_lanes) {
    add_columns([](const Stored* from) { return Dots::load_row(from); });
    FLASH_ATTENTION_UNROLL
    for (int i = 0; i < step / run; ++i) first[i] += Dots::columns;
  }
  if constexpr (Dots::any_width) {
    const int left = head_dim - column;
    if (left > 0) add_columns([&](const Stored* from) { return Dots::load_end(from, left); });
  }
  alignas(64) float dots[vector_lanes];
  store(dots, sum_each(sum) * factor);
  FLASH_ATTENTION_UNROLL
  for (int r = 0; r < rows; ++r) __builtin_memcpy(S + r * block_kv, dots + r * step, step * sizeof(float));
}

/// All keys of a tile.
template <int rows, class Dots>
inline void dot_tile(KeyRows<typename Dots::Element> K, int keys, const float* Q, int head_dim, float factor, float* S,
                     NextTile& next) {
  using Stored = typename Dots::Element::Stored;
  constexpr int step = vector_lanes / rows;
  int key = 0;
  for (; key + step <= keys; key += step) {
    next.ask_for_keys();
    dot_square<rows, Dots>({K.data + key * K.stride, K.stride}, Q, head_dim, factor, S + key);
  }
  if (key == keys) return;
  alignas(64) Stored rest[step * max_head_dim];  // the last keys, the very last one again and again
  for (int j = 0; j < step; ++j) {
    __builtin_memcpy(rest + j * head_dim, K.data + smaller(key + j, keys - 1) * K.stride,
                     static_cast<std::size_t>(head_dim) * sizeof(Stored));
  }
  dot_square<rows, Dots>({rest, head_dim}, Q, head_dim, factor, S + key);
}

/// All rows. Q and S have room for whole groups; rows past the last are never looked at.
template <class Dots>
inline void dot_rows(int rows, KeyRows<typename Dots::Element> K, int keys, const float* Q, int head_dim, float factor,
                     float* S, NextTile& next) {
  if (rows == 1) return dot_tile<1, Dots>(K, keys, Q, head_dim, factor, S, next);
  if (rows == 2) return dot_tile<2, Dots>(K, keys, Q, head_dim, factor, S, next);
  if (rows <= 4) return dot_tile<4, Dots>(K, keys, Q, head_dim, factor, S, next);
  constexpr int group = smaller(decode_rows, vector_lanes);
  const int q_stride = round_up(head_dim, Dots::columns) / Dots::columns * vector_lanes;
  for (int r = 0; r < rows; r += group) {
    dot_tile<group, Dots>(K, keys, Q + r * q_stride, head_dim, factor, S + r * block_kv, next);
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
  finish_decode_scores(call, block, tile, scratch);
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

/// One tile of one key head, with K and V as they lie.
template <class Dots>
inline void decode_in_place(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head,
                            DecodeScratch& scratch, NextTile& next) {
  using T = typename Dots::Element;
  const auto rows_of = [&](const TensorView& tensor) {
    const auto* first = reinterpret_cast<const typename T::Stored*>(block.keys(call, tensor));
    return KeyRows<T>{first + tile.begin * tensor.seq_stride, tensor.seq_stride};
  };
  decode_scores<Dots>(call, block, tile, rows_of(call.k), head, scratch, next);
  decode_values<Dots>(call, block, tile, rows_of(call.v), head.O, scratch, next);
}

/// One tile of one key head.
template <class Dots>
inline void decode_tile(const Call& call, const RowBlock& block, const Tile& tile, DecodeHead& head, DecodeScratch& scratch,
                        NextTile& next) {
  using T = typename Dots::Element;
  const bool fits = call.head_dim % Dots::columns == 0 && call.head_dim_v % Dots::columns == 0;
  if (tile.weighted && (fits || Dots::any_width)) return decode_in_place<Dots>(call, block, tile, head, scratch, next);
  if (tile.weighted) return decode_in_place<FloatDots<T>>(call, block, tile, head, scratch, next);
  const FloatRows K = key_rows(call, block, call.k, tile.begin, tile.count, call.head_dim, false, scratch.K);
  const FloatRows V = key_rows(call, block, call.v, tile.begin, tile.count, call.head_dim_v, false, scratch.V);
  const SafeRows safe = make_safe(V, tile.count, call.head_dim_v, false, scratch.safe);
  decode_scores<FloatDots<Float32>>(call, block, tile, {K.data, K.stride}, head, scratch, next);
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
  for (int i = 0; i < rows * columns; ++i) head.Q[i] = 0;
  for (int i = 0; i < rows * columns_v; ++i) head.O[i] = 0;
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

  const int rows = decode_stack / plan::cpu_decode_heads(block.rows, decode_stack, true);  // with their padding
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
