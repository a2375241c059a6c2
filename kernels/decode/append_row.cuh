#pragma once

#include "abi/append.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/math.cuh"
#include "tile/narrow.cuh"

// Shared by decode/append and its gradient: the place of a token, and a row of a head in the registers of its lanes.

namespace flash_attention::decode {

using namespace abi;

/// The place of a new row: its sequence, its place in the cache, the position of its angle.
struct Token {
  bool exists = false;
  int batch_idx = 0;
  long long batch = 0;  // index in the source tensor; 0 if its rows are packed
  long long row = 0;
  long long position = 0;
  long long angle = 0;
};

/// A row of the cache. Without pages, the page is the sequence.
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

/// same_angle: all tokens of a sequence have the angle of its first token.
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

/// The offset of the token's first head.
__device__ __forceinline__ long long offset_of(const TensorView& view, const Token& token) {
  return token.batch * view.batch_stride + token.row * view.seq_stride;
}

/// The slot of a token. If the position or the page is out of range, the slot does not exist: so nothing outside of the
/// cache is written, and nothing outside of the table is read.
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

template <int n>
struct Count {
  static constexpr int value = n;
};

/// Loads `values` from memory, in accesses of up to `vector` elements.
template <int vector, int count, typename T>
__device__ __forceinline__ void load_values(float* values, const T* from) {
  constexpr int width = tile::min(tile::min(count, vector), 16 / sizeof(T));
#pragma unroll
  for (int first = 0; first < count; first += width) {
    const auto raw = *reinterpret_cast<const ptx::Vector<T, width>*>(from + first);
#pragma unroll
    for (int i = 0; i < width; ++i) values[first + i] = tile::to_float(raw[i]);
  }
}

template <Type type, int vector, int count>
__device__ __forceinline__ void store_values(tile::Stored<type>* to, const float* values) {
  constexpr int width = tile::min(tile::min(count, vector), 16 / sizeof(tile::Stored<type>));
#pragma unroll
  for (int first = 0; first < count; first += width) {
    ptx::Vector<tile::Stored<type>, width> raw;
#pragma unroll
    for (int i = 0; i < width; ++i) raw[i] = tile::encode<type>(values[first + i]);
    *reinterpret_cast<ptx::Vector<tile::Stored<type>, width>*>(to + first) = raw;
  }
}

/// The elements of a row that a lane holds. A unit is what a lane moves at a time: a vector; or the two halves of
/// `vector` pairs; or one pair, if a vector has no room for it. Rotated units come before the others.
template <AppendConfig config, int head_dim, bool rotated>
struct AppendRow {
  static constexpr int dim = head_dim, vector = config.vector, lanes = config.lanes;
  static constexpr int rotary_dim = rotated ? config.rotary_dim : 0;
  static constexpr bool rotates = rotary_dim > 0, halves = rotates && !config.interleaved;
  static constexpr int pair_width = vector == 1 ? 2 : vector;
  static constexpr int pairs = halves ? vector : pair_width / 2;  // of a unit
  static constexpr int rotated_units = halves ? rotary_dim / 2 / vector : rotary_dim / pair_width;
  static constexpr int units = rotated_units + (dim - rotary_dim) / vector;
  static constexpr int each = (units + lanes - 1) / lanes;
  static constexpr int rotated_each = tile::max(1, (rotated_units + lanes - 1) / lanes);
  static constexpr int width = halves ? 2 * vector : rotates ? pair_width : vector;

  float x[each][width];  // 0 if a unit has fewer

  /// Calls visit(Count, values, column) for each run of columns.
  template <typename Visit>
  __device__ __forceinline__ void for_each_run(int lane, Visit visit) {
#pragma unroll
    for (int e = 0; e < each; ++e) {
      const int unit = lane + e * lanes;
      if (e * lanes < rotated_units && unit < rotated_units) {
        if constexpr (halves) {
          visit(Count<vector>{}, x[e], unit * vector);
          visit(Count<vector>{}, x[e] + vector, unit * vector + rotary_dim / 2);
        } else if constexpr (rotates) {
          visit(Count<pair_width>{}, x[e], unit * pair_width);
        }
      } else if (unit < units) {
        visit(Count<vector>{}, x[e], rotary_dim + (unit - rotated_units) * vector);
      }
    }
  }

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int e = 0; e < each; ++e)
#pragma unroll
      for (int i = 0; i < width; ++i) x[e][i] = value;
  }

  template <typename T>
  __device__ __forceinline__ void load(int lane, const T* from) {
    fill(0);
    for_each_run(lane, [&](auto count, float* values, int column) {
      load_values<vector, decltype(count)::value>(values, from + column);
    });
  }

  template <Type type>
  __device__ __forceinline__ void store(int lane, tile::Stored<type>* to) {
    for_each_run(lane, [&](auto count, float* values, int column) {
      store_values<type, vector, decltype(count)::value>(to + column, values);
    });
  }

  /// Loads a weight for each column, 1 if there are no weights.
  __device__ __forceinline__ void load_weights(int lane, const void* weights) {
    if (weights == nullptr) return fill(1);
    load(lane, static_cast<const tile::Stored<config.norm_dtype>*>(weights));
    if constexpr (config.plus_one) {
#pragma unroll
      for (int e = 0; e < each; ++e)
#pragma unroll
        for (int i = 0; i < width; ++i) x[e][i] += 1;
    }
  }

  /// The sum of f(unit, element) over the row. All of its lanes get it.
  template <typename F>
  __device__ __forceinline__ static float sum(F f) {
    float total = 0;
#pragma unroll
    for (int e = 0; e < each; ++e)
#pragma unroll
      for (int i = 0; i < width; ++i) total += f(e, i);
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) total += ptx::shuffle_xor(total, step);
    return total;
  }

  /// 1 / the root mean square.
  __device__ __forceinline__ float inverse_rms(float eps) const {
    const float squares = sum([&](int e, int i) { return x[e][i] * x[e][i]; });
    return 1 / ptx::sqrt(squares / dim + eps);
  }

  __device__ __forceinline__ float largest() const {
    float most = 0;
#pragma unroll
    for (int e = 0; e < each; ++e)
#pragma unroll
      for (int i = 0; i < width; ++i) most = ptx::max(most, ptx::abs(x[e][i]));
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) most = ptx::max(most, ptx::shuffle_xor(most, step));
    return most;
  }
};

/// The cos and sin of the pairs that a lane holds.
template <AppendConfig config, typename Row>
struct Angles {
  using Rotary = tile::Stored<config.rotary_dtype>;
  float cos[Row::rotated_each][Row::pairs], sin[Row::rotated_each][Row::pairs];

  __device__ __forceinline__ static int section_of(const AppendArgs& args, int pair) {
    if constexpr (config.sections_interleaved) {
      const int section = pair % args.angle_sections;
      return pair < args.angle_sections * args.sections[section] ? section : 0;
    } else {
      int section = 0;
      for (int end = args.sections[0]; section + 1 < args.angle_sections && pair >= end;) end += args.sections[++section];
      return section;
    }
  }

  /// The row of the tables for an angle; the nearest one if the angle is outside.
  __device__ __forceinline__ static long long row_of(const AppendArgs& args, long long angle) {
    return (angle < 0 ? 0 : angle < args.rotary_positions ? angle : args.rotary_positions - 1) * args.rotary_stride;
  }

  /// Loads the angles of token `idx` of `tokens`.
  __device__ __forceinline__ void load(const AppendArgs& args, int lane, const Token& token, long long idx,
                                       long long tokens) {
    if constexpr (Row::rotates) {
      const auto* cosines = static_cast<const Rotary*>(args.cos);
      const auto* sines = static_cast<const Rotary*>(args.sin);
      const long long row = row_of(args, config.angles ? args.angle_positions[idx] : token.angle);
#pragma unroll
      for (int e = 0; e < Row::rotated_each; ++e) {
        const int unit = lane + e * Row::lanes;
        if (unit >= Row::rotated_units) continue;
        if constexpr (config.sections) {
#pragma unroll
          for (int p = 0; p < Row::pairs; ++p) {
            const int pair = unit * Row::pairs + p;
            const long long own = row_of(args, args.angle_positions[section_of(args, pair) * tokens + idx]);
            cos[e][p] = tile::to_float(cosines[own + pair]);
            sin[e][p] = tile::to_float(sines[own + pair]);
          }
        } else {
          load_values<Row::vector, Row::pairs>(cos[e], cosines + row + unit * Row::pairs);
          load_values<Row::vector, Row::pairs>(sin[e], sines + row + unit * Row::pairs);
        }
      }
    }
  }

  /// Rotates the row's pairs, or rotates their gradients back.
  template <bool back>
  __device__ __forceinline__ void turn(Row& row, int lane) const {
    if constexpr (Row::rotates) {
#pragma unroll
      for (int e = 0; e < Row::rotated_each; ++e) {
        if (lane + e * Row::lanes >= Row::rotated_units) continue;
#pragma unroll
        for (int p = 0; p < Row::pairs; ++p) {
          float& first = row.x[e][Row::halves ? p : 2 * p];
          float& second = row.x[e][Row::halves ? p + Row::vector : 2 * p + 1];
          const float a = first, b = second, s = back ? -sin[e][p] : sin[e][p];
          first = a * cos[e][p] - b * s;
          second = a * s + b * cos[e][p];
        }
      }
    }
  }
};

}  // namespace flash_attention::decode
