#pragma once

#include "abi/append.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"
#include "tile/narrow.cuh"

// Writes new keys and values to a cache, paged or not, and applies the rotary embedding to queries and keys: one launch
// before decoding.
//
//   for each row (one token and head; queries first, then keys, then values), `lanes` lanes a row:
//     find the token's sequence, position and angle                                   token_of, slot_of
//     read, rotate in float, [scale by the largest element of the row], round, write
//
// Rows do not depend on each other. A row without a place in the cache is not written.

namespace flash_attention::decode {

// The place of a new row: its sequence, its place in the cache, the position of its angle.

using namespace abi;

struct Token {
  bool exists = false;
  int batch_idx = 0;
  long long batch = 0;  // index in the source tensor; 0 if its rows are packed
  long long row = 0;
  long long position = 0;
  long long angle = 0;
};

/// A row of the cache. The page is the sequence if there are no pages.
struct Slot {
  bool exists = false;
  long long page = 0;
  long long row = 0;
};

/// The last sequence that begins at or before the row.
__device__ __forceinline__ int sequence_of(const int* starts, int batch, long long row) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// same_angle: all tokens of a sequence have the angle of the first one.
__device__ __forceinline__ Token token_of(const AppendArgs& args, long long idx, const int* starts, int seq,
                                          bool same_angle) {
  Token token;
  token.exists = true;
  token.row = idx;
  if (args.sequences != nullptr) {
    token.batch_idx = args.sequences[idx];
    token.position = token.angle = args.positions[idx];
    token.exists = token.batch_idx >= 0 && token.batch_idx < args.batch;
    return token;
  }
  long long first = 0;
  if (starts != nullptr) {
    token.batch_idx = sequence_of(starts, args.batch, idx);
    first = starts[token.batch_idx];
    token.exists = idx >= first && idx < starts[token.batch_idx + 1];
  } else {
    token.batch_idx = static_cast<int>(idx / seq);
    token.batch = token.batch_idx;
    token.row = idx % seq;
  }
  const long long step = token.row - first;
  const long long length = args.lengths != nullptr ? args.lengths[token.batch_idx] : 0;
  token.position = length + step;
  token.angle = (args.rotary_offsets != nullptr ? args.rotary_offsets[token.batch_idx] : length) + (same_angle ? 0 : step);
  return token;
}

__device__ __forceinline__ long long offset_of(const TensorView& view, const Token& token, int head_idx) {
  return token.batch * view.batch_stride + token.row * view.seq_stride + head_idx * view.head_stride;
}

/// The slot of a token; it does not exist if the position or the page is out of range. So nothing outside of the cache is
/// written, and nothing outside of the table is read.
template <bool paged>
__device__ __forceinline__ Slot slot_of(const AppendArgs& args, const Token& token) {
  if (!token.exists || token.position < 0 || token.position >= args.capacity) return {};
  if constexpr (paged) {
    const int position = static_cast<int>(token.position);
    const int page = args.page_table[token.batch_idx * args.page_table_stride + position / args.page_size];
    return {page >= 0 && page < args.num_pages, page, position % args.page_size};
  } else {
    return {true, token.batch_idx, token.position};
  }
}

}  // namespace flash_attention::decode

namespace flash_attention {

template <abi::AppendConfig config>
struct DecodeAppend {
  static constexpr int vector = config.vector, lanes = config.lanes;
  static constexpr int pair_width = vector == 1 ? 2 : vector;  // interleaved: elements that are rotated together
  static constexpr bool narrow = abi::is_narrow(config.cache_dtype);
  using Element = tile::Stored<config.dtype>;
  using Cached = tile::Stored<config.cache_dtype>;
  using Rotary = tile::Stored<config.rotary_dtype>;

  const abi::AppendArgs& args;
  int lane = static_cast<int>(threadIdx.x) % lanes;

  template <int count, typename T>
  __device__ __forceinline__ static void load(float (&values)[count], const T* from) {
    constexpr int width = tile::min(tile::min(count, vector), 16 / sizeof(T));
#pragma unroll
    for (int first = 0; first < count; first += width) {
      const auto raw = *reinterpret_cast<const ptx::Vector<T, width>*>(from + first);
#pragma unroll
      for (int i = 0; i < width; ++i) values[first + i] = tile::to_float(raw[i]);
    }
  }

  template <abi::Type type, int count>
  __device__ __forceinline__ static void store(tile::Stored<type>* to, const float (&values)[count]) {
    constexpr int width = tile::min(tile::min(count, vector), 16 / sizeof(tile::Stored<type>));
#pragma unroll
    for (int first = 0; first < count; first += width) {
      ptx::Vector<tile::Stored<type>, width> raw;
#pragma unroll
      for (int i = 0; i < width; ++i) raw[i] = tile::encode<type>(values[first + i]);
      *reinterpret_cast<ptx::Vector<tile::Stored<type>, width>*>(to + first) = raw;
    }
  }

  /// Calls visit(column, values) for this lane's elements of a row, after the first rotary_dim columns have been rotated.
  template <bool rotated, typename Visit>
  __device__ __forceinline__ void for_each_unit(const Element* from, int dim, long long angle, Visit visit) const {
    int rotated_units = 0, rotated_dims = 0;
    if constexpr (rotated) {
      rotated_dims = args.rotary_dim;
      rotated_units = config.interleaved ? rotated_dims / pair_width : rotated_dims / 2 / vector;
    }
    const int units = rotated_units + (dim - rotated_dims) / vector;
    for (int unit = lane; unit < units; unit += lanes) {
      if (unit >= rotated_units) {
        const int column = rotated_dims + (unit - rotated_units) * vector;
        float values[vector];
        load(values, from + column);
        visit(column, values);
      } else if constexpr (rotated) {
        rotate(from, unit, angle, visit);
      }
    }
  }

  /// Rotates the pairs of one unit.
  template <typename Visit>
  __device__ __forceinline__ void rotate(const Element* from, int unit, long long angle, Visit visit) const {
    const long long nearest = angle < 0 ? 0 : angle < args.rotary_positions ? angle : args.rotary_positions - 1;
    const Rotary* cos_row = static_cast<const Rotary*>(args.cos) + nearest * args.rotary_stride;
    const Rotary* sin_row = static_cast<const Rotary*>(args.sin) + nearest * args.rotary_stride;
    if constexpr (config.interleaved) {
      constexpr int pairs = pair_width / 2;
      const int column = unit * pair_width;
      float values[pair_width], cos[pairs], sin[pairs];
      load(values, from + column);
      load(cos, cos_row + column / 2);
      load(sin, sin_row + column / 2);
#pragma unroll
      for (int p = 0; p < pairs; ++p) {
        const float first = values[2 * p], second = values[2 * p + 1];
        values[2 * p] = first * cos[p] - second * sin[p];
        values[2 * p + 1] = first * sin[p] + second * cos[p];
      }
      visit(column, values);
    } else {
      const int column = unit * vector, half = args.rotary_dim / 2;
      float first[vector], second[vector], cos[vector], sin[vector];
      load(first, from + column);
      load(second, from + column + half);
      load(cos, cos_row + column);
      load(sin, sin_row + column);
#pragma unroll
      for (int p = 0; p < vector; ++p) {
        const float x = first[p], y = second[p];
        first[p] = x * cos[p] - y * sin[p];
        second[p] = x * sin[p] + y * cos[p];
      }
      visit(column, first);
      visit(column + half, second);
    }
  }

  /// Rotates a row of queries and writes it to Q_out.
  __device__ __forceinline__ void query(long long row) const {
    if (row >= args.rows_q) return;
    const int head_idx = static_cast<int>(row % args.heads_q);
    const decode::Token token =
        decode::token_of(args, row / args.heads_q, args.cu_seqlens_q, args.seq_q, args.one_query != 0);
    if (!token.exists) return;
    const auto* from = static_cast<const Element*>(args.Q.data) + decode::offset_of(args.Q, token, head_idx);
    auto* to = static_cast<Element*>(args.Q_out.data) + decode::offset_of(args.Q_out, token, head_idx);
    for_each_unit<config.rotary>(from, args.head_dim, token.angle,
                                 [&](int column, const auto& values) { store<config.dtype>(to + column, values); });
  }

  /// Writes a row of keys or values to the cache. All lanes of the warp call this, also those without a row, because of the
  /// shuffles.
  template <bool rotated>
  __device__ __forceinline__ void cache_row(long long row, bool exists, const abi::TensorView& source,
                                            const abi::TensorView& cache, const abi::ScaleView& scales, int dim) const {
    decode::Token token{};
    decode::Slot slot{};
    int head_idx = 0;
    if (exists) {
      head_idx = static_cast<int>(row % args.heads_kv);
      token = decode::token_of(args, row / args.heads_kv, args.cu_seqlens_new, args.seq_new, false);
      slot = decode::slot_of<config.paged>(args, token);
    }
    exists = exists && slot.exists;
    const auto* from = static_cast<const Element*>(source.data) + decode::offset_of(source, token, head_idx);
    float inverse = 1;
    if constexpr (config.token_scales) {
      float most = 0;
      if (exists) {
        for_each_unit<rotated>(from, dim, token.angle, [&](int, const auto& values) {
          for (const float value : values) most = ptx::max(most, ptx::abs(value));
        });
      }
#pragma unroll
      for (int step = 1; step < lanes; step *= 2) most = ptx::max(most, ptx::shuffle_xor(most, step));
      constexpr float least = 0x1p-100f, finite = __builtin_bit_cast(float, 0x7f7fffffu);
      most = ptx::max(least, most < finite ? most : finite);
      const float scale = most / tile::largest_code<config.cache_dtype>;
      inverse = 1 / scale;
      if (exists && lane == 0)
        const_cast<float*>(
            scales.data)[slot.page * scales.batch_stride + slot.row * scales.seq_stride + head_idx * scales.head_stride] =
            scale;
    } else if constexpr (config.scales) {
      if (exists) inverse = 1 / scales.data[token.batch_idx * scales.batch_stride + head_idx * scales.head_stride];
    }
    if (!exists) return;
    auto* to = static_cast<Cached*>(cache.data) + slot.page * cache.batch_stride + slot.row * cache.seq_stride +
               head_idx * cache.head_stride;
    for_each_unit<rotated>(from, dim, token.angle, [&](int column, auto& values) {
      if constexpr (config.scales) {
        for (float& value : values) value *= inverse;
      }
      store<config.cache_dtype>(to + column, values);
    });
  }

  /// A warp's rows are all queries, all keys or all values: the lanes that share a row's maximum must execute the same
  /// code.
  __device__ __forceinline__ void work() const {
    constexpr int rows_of_warp = 32 / lanes;
    const auto warps_of = [](long long rows) { return (rows + rows_of_warp - 1) / rows_of_warp; };
    const int own = static_cast<int>(threadIdx.x) % 32 / lanes;
    long long warp = static_cast<long long>(blockIdx.x) * (abi::append_threads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (warp < warps_of(args.rows_q)) return query(warp * rows_of_warp + own);
    warp -= warps_of(args.rows_q);
    if (warp < warps_of(args.rows_keys)) {
      const long long row = warp * rows_of_warp + own;
      return cache_row<config.rotary>(row, row < args.rows_keys, args.K, args.K_cache, args.K_scale, args.head_dim);
    }
    const long long row = (warp - warps_of(args.rows_keys)) * rows_of_warp + own;
    cache_row<false>(row, row < args.rows_values, args.V, args.V_cache, args.V_scale, args.head_dim_v);
  }
};

template <abi::AppendConfig config>
__device__ __forceinline__ void decode_append(const abi::AppendArgs& args) {
  DecodeAppend<config>{args}.work();
}

}  // namespace flash_attention
