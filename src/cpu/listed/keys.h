#pragma once

// Lists of keys (docs/numerics.md): the rows that share a list, and tiles of the keys that it names, gathered as float.

#include "cpu/tile/dropout.h"
#include "cpu/tile/hidden.h"
#include "cpu/tile/partial.h"

namespace flash_attention::cpu {
namespace {

/// How rows share lists. If each query head has its own lists, the rows of one head are together; otherwise those of
/// all heads of a key head.
struct ListShape {
  int units, stack;  // stacks of heads, and the heads of each
  bool own;          // each unit has its own lists

  explicit ListShape(const Call& call) {
    const bool by_query_head = call.list_heads == call.heads_q && call.heads_q != call.heads_kv;
    units = by_query_head ? call.heads_q : call.heads_kv;
    stack = call.heads_q / units;
    own = call.list_heads > 1;
  }
  int list_head(int unit) const { return own ? unit : 0; }
};

inline std::int64_t list_rows(const Call& call) { return ceil_div(call.seq_q, call.list_block_q); }
/// Blocks of rows that share a list.
inline std::int64_t list_chunks(const Call& call, const ListShape& shape) {
  return ceil_div(call.list_block_q * shape.stack, block_q);
}

/// A block of rows that share one list.
struct ListBlock {
  RowBlock rows;
  const std::int32_t* entries;
  std::int64_t count;

  ListBlock(const Call& call, const ListShape& shape, std::int64_t batch, int unit, std::int64_t list_row,
            std::int64_t chunk)
      : rows(call, batch, unit * shape.stack, shape.stack,
             list_row * call.list_block_q * shape.stack + chunk * block_q) {
    const std::int64_t left = call.list_block_q * shape.stack - chunk * block_q;
    if (rows.rows > left) {  // the rows after them have another list
      rows.rows = static_cast<int>(left);
      rows.vectors = round_up(rows.rows, lane_multiple) / vector_lanes;
    }
    const bool packed = call.cu_seqlens_q != nullptr;
    const std::int64_t first = packed ? rows.sequence.q_begin + list_row : batch * list_rows(call) + list_row;
    const std::int64_t idx = first * call.list_heads + shape.list_head(unit);
    entries = call.key_list + idx * call.list_entries;
    count = call.list_entries;
    if (call.key_counts != nullptr && rows.rows > 0) {
      count = smaller<std::int64_t>(larger<std::int64_t>(call.key_counts[idx], 0), count);
    }
  }
};

/// Goes over the keys of a list.
class ListedKeys {
 public:
  ListedKeys(const Call& call, const ListBlock& block) : call_(call), block_(block) {}

  /// The next keys that a row of the block may see, at most block_kv. Returns 0 at the end.
  int next(std::int32_t* keys) {
    const RowBlock& rows = block_.rows;
    const std::int64_t size = call_.list_block_kv, limit = ceil_div(rows.sequence.kv_used, size);
    int found = 0;
    while (found < block_kv && entry_ < block_.count) {
      const std::int64_t value = block_.entries[entry_];
      if (offset_ == 0 && (value < 0 || value >= limit || (call_.list_set && stands_before()))) {
        ++entry_;
        continue;
      }
      const std::int64_t key = value * size + offset_;
      if (key >= rows.key_begin && key < rows.key_end) keys[found++] = static_cast<std::int32_t>(key);
      if (++offset_ == size) offset_ = 0, ++entry_;
    }
    return found;
  }

 private:
  bool stands_before() const {
    for (std::int64_t e = 0; e < entry_; ++e) {
      if (block_.entries[e] == block_.entries[entry_]) return true;
    }
    return false;
  }

  const Call& call_;
  const ListBlock& block_;
  std::int64_t entry_ = 0, offset_ = 0;
};

/// Gathers rows of a tensor over the keys as float, one after another. from: the column of `to` in which they begin.
inline void gather_keys(const Call& call, const RowBlock& block, const TensorView& tensor, const std::int32_t* keys,
                        int count, int columns, float* to, int stride) {
  with_element(call.kv_dtype, [&](auto type) {
    using T = decltype(type);
    for (int n = 0; n < count; ++n) {
      const auto* row = reinterpret_cast<const typename T::Stored*>(block.key_row(call, tensor, keys[n]));
      copy_row<T>(row, columns, to + n * stride, stride);
    }
  });
}

struct ListedTile {
  FloatRows K, V;
};

/// Gathers K and V of a tile. Latent keys begin with their values; `spare` has room for a tile.
inline ListedTile gather_tile(const Call& call, const RowBlock& block, const std::int32_t* keys, int count, float* K,
                              float* V, float* spare) {
  const int stride = round_up(call.head_dim, vector_lanes), stride_v = round_up(call.head_dim_v, vector_lanes);
  gather_keys(call, block, call.v, keys, count, call.head_dim_v, V, stride_v);
  if (!call.latent) {
    gather_keys(call, block, call.k, keys, count, call.head_dim, K, stride);
    return {{K, stride}, {V, stride_v}};
  }
  const int own = call.key_columns(), stride_own = round_up(own, vector_lanes);
  gather_keys(call, block, call.k, keys, count, own, spare, stride_own);
  for (int n = 0; n < count; ++n) {
    float* to = K + n * stride;
    for (int c = 0; c < call.head_dim_v; ++c) to[c] = V[n * stride_v + c];
    for (int c = call.head_dim_v; c < call.head_dim; ++c) to[c] = spare[n * stride_own + c - call.head_dim_v];
    for (int c = call.head_dim; c < stride; ++c) to[c] = 0;
  }
  return {{K, stride}, {V, stride_v}};
}

/// Applies softcap, bias, ALiBi and the masks to S[key][lane]. derivative is that of softcap and may be null.
inline void finish_listed(const Call& call, const RowBlock& block, const std::int32_t* keys, int count, float* S,
                          float* derivative) {
  const int lanes = block.lanes();
  if (call.softcap > 0) apply_softcap(call, count * lanes, S, {.first = derivative});
  const std::int64_t shift = block.sequence.kv_used - block.sequence.q_used;
  for (int n = 0; n < count; ++n) {
    const std::int64_t j = keys[n];
    float* const row = S + n * lanes;
    for (int lane = 0; lane < block.rows && call.bias.data != nullptr; ++lane) {
      with_any_element(call.bias.dtype, [&](auto type) {
        using T = decltype(type);
        const auto* bias = reinterpret_cast<const typename T::Stored*>(call.bias.data) +
                           block.batch * call.bias.batch_stride + block.head[lane] * call.bias.head_stride +
                           block.query[lane] * call.bias.q_stride + j;
        row[lane] += scaled_bias(load_some<T>(bias, 1))[0];
      });
    }
    for (int lane = 0; lane < block.rows && call.alibi_slopes != nullptr; ++lane) {
      const float slope = call.alibi_slopes[block.batch * call.alibi_batch_stride + block.head[lane]] * log2_e;
      const std::int64_t distance = block.query[lane] + shift - j;
      row[lane] -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    for (int lane = 0; lane < block.rows && call.mask.data != nullptr; ++lane) {
      const char* mask = call.mask.data + block.batch * call.mask.batch_stride + block.head[lane] * call.mask.head_stride +
                         block.query[lane] * call.mask.q_stride;
      if (mask[j] == 0) row[lane] = -infinity;
    }
    const Int key = Int{} + keys[n];
    for (int lane = 0; lane < lanes; lane += vector_lanes) {
      const Int begin = load(block.begin + lane), end = load(block.end + lane);
      store(row + lane, select((key >= begin) & (key < end), load(row + lane), splat(-infinity)));
    }
  }
}

/// keep[key][lane] = 1 / (1 - p) if the score is kept, otherwise 0.
inline void listed_dropout(const Call& call, const RowBlock& block, const std::int32_t* keys, int count, float* keep) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  for (int n = 0; n < count; ++n) {
    const std::int32_t j = keys[n];
    for (int first = 0; first < block.lanes(); first += vector_lanes) {
      alignas(64) std::uint32_t words[4][vector_lanes];
      for (int lane = 0; lane < vector_lanes; ++lane) {
        const int i = block.query[first + lane];
        words[0][lane] = static_cast<std::uint32_t>(i / 16 * 8 + i % 8);
        words[1][lane] = static_cast<std::uint32_t>(j / 16 * 4 + j % 8 / 2);
        words[2][lane] = static_cast<std::uint32_t>(block.batch * call.heads_q + block.head[first + lane]);
        words[3][lane] = low(call.offset);
      }
      philox(words, low(call.seed), high(call.seed) ^ high(call.offset));
      for (int lane = 0; lane < vector_lanes; ++lane) {
        std::uint32_t word = words[2 * (block.query[first + lane] / 8 % 2) + j / 8 % 2][lane];
        if (j % 2 != 0) word = word << 16 | word >> 16;
        keep[n * block.lanes() + first + lane] = word >= call.drop_threshold ? call.keep_scale : 0.0f;
      }
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
