#pragma once

#include "decode/append_groups.cuh"
#include "decode/append_row.cuh"
#include "ptx/shared.cuh"

// Writes new keys and values to a cache, paged or not, after the norms of queries and keys and the rotary embedding: one
// launch before decoding.
//
//   for each token, `heads_of_task` heads a warp (queries first, then keys, then values), `lanes` lanes a row:
//     find the token's sequence, position and angle                                   token_of, slot_of
//     read, normalise and rotate in float, [scale by the largest element of the row], round, write
//
// A cache of 4 bits has scales of groups of columns. Its rows go through shared memory, where a lane has whole groups.
//
// A row stays in registers from its only read to its only write. Rows do not depend on each other. A row that has no
// place in the cache is not written.

namespace flash_attention {

template <abi::AppendConfig config>
struct DecodeAppend {
  static constexpr int lanes = config.lanes, rows_of_warp = 32 / lanes;
  static constexpr bool rotary = config.rotary_dim > 0;
  using Element = tile::Stored<config.dtype>;
  using Cached = tile::Stored<config.cache_dtype>;
  using Key = decode::AppendRow<config, config.head_dim, rotary>;
  using Value = decode::AppendRow<config, config.head_dim_v, false>;

  const abi::AppendArgs& args;
  int lane = static_cast<int>(threadIdx.x) % lanes;
  int own = static_cast<int>(threadIdx.x) % 32 / lanes;  // the lane's row among those that a warp has at the same time

  /// Calls write(row, head_idx, exists) with the finished row of each head of a token, from `first` on. Data of the
  /// token is read once for all its heads. All lanes of a warp call this, even those without a row, because of the
  /// shuffles.
  template <bool norm, typename Row, typename Write>
  __device__ __forceinline__ void for_each_head(const abi::TensorView& source, const decode::Token& token, long long idx,
                                                long long tokens, int first, int heads, const void* weight,
                                                Write write) const {
    decode::Angles<config, Row> angles;
    Row weights, row;
    if (token.exists) angles.load(args, lane, token, idx, tokens);
    if constexpr (norm) weights.load_weights(lane, weight);
    const auto* from = static_cast<const Element*>(source.data) + decode::offset_of(source, token);
    const int last = tile::min(first + args.heads_of_task, heads);
    for (int at = first; at < last; at += rows_of_warp) {
      const int head_idx = at + own;
      const bool exists = head_idx < last;
      if (exists && token.exists) {
        row.load(lane, from + head_idx * source.head_stride);
      } else {
        row.fill(0);
      }
      if constexpr (norm) {
        const float inverse = row.inverse_rms(args.norm_eps);
#pragma unroll
        for (int e = 0; e < Row::each; ++e)
#pragma unroll
          for (int i = 0; i < Row::width; ++i) row.x[e][i] = row.x[e][i] * inverse * weights.x[e][i];
      }
      if (token.exists) angles.template turn<false>(row, lane);
      write(row, head_idx, exists);
    }
  }

  __device__ __forceinline__ void queries(long long idx, int first) const {
    const decode::Token token = decode::token_of(args, idx, args.cu_seqlens_q, args.seq_q, args.one_query != 0);
    if (!token.exists && !config.in_rows) return;
    auto* to = static_cast<Element*>(args.Q_out.data) + decode::offset_of(args.Q_out, token);
    for_each_head<config.q_norm, Key>(args.Q, token, idx, args.tokens_q, first, args.heads_q, args.q_weight,
                                      [&](Key& row, int head_idx, bool exists) {
                                        if (exists)
                                          row.template store<config.dtype>(lane, to + head_idx * args.Q_out.head_stride);
                                      });
  }

  /// A row as groups of codes; all lanes of the warp come here.
  template <typename Row>
  __device__ __forceinline__ void store_groups(Row& row, bool exists, unsigned char* codes, const abi::GroupView& groups,
                                               const decode::Slot& slot, int head_idx, float tensor_scale) const {
    using Scale = typename tile::GroupScaleOf<config.cache_dtype, config.dtype>::Kind;
    auto* const rows = reinterpret_cast<float*>(&ptx::shared_storage<char>());
    float* const x = rows + static_cast<int>(threadIdx.x) / lanes * tile::max(config.head_dim, config.head_dim_v);
    row.for_each_run(lane, [&](auto count, float* values, int column) {
#pragma unroll
      for (int i = 0; i < decltype(count)::value; ++i) x[column + i] = values[i];
    });
    __syncwarp();  // the row is whole for all of its lanes
    const long long first = slot.page * groups.batch_stride + slot.row * groups.seq_stride + head_idx * groups.head_stride;
    for (int group = lane; exists && group < Row::dim / config.group; group += lanes) {
      decode::GroupPlace<Scale> to{codes + group * (config.group / 2), static_cast<Scale*>(groups.scales) + first + group,
                                   nullptr};
      if constexpr (config.cache_dtype == abi::Type::int4) to.zero = static_cast<Scale*>(groups.zeros) + first + group;
      decode::store_group<config>(x + group * config.group, tensor_scale, to);
    }
    __syncwarp();  // its lanes have read the row
  }

  template <typename Row, bool norm>
  __device__ __forceinline__ void cache_rows(long long idx, int first, const abi::TensorView& source,
                                             const abi::TensorView& cache, const abi::ScaleView& scales,
                                             const abi::GroupView& groups, const void* weight) const {
    const decode::Token token = decode::token_of(args, idx, args.cu_seqlens_new, args.seq_new, false);
    decode::Slot slot{true, token.batch, token.row};
    if constexpr (!config.in_rows) slot = decode::slot_of<config.paged>(args, token);
    if (!slot.exists) return;
    auto* to = static_cast<Cached*>(cache.data) + slot.page * cache.batch_stride + slot.row * cache.seq_stride;
    const auto write = [&](Row& row, int head_idx, bool exists) {
      if constexpr (config.group > 0) {
        auto* codes = reinterpret_cast<unsigned char*>(to) + head_idx * cache.head_stride;
        store_groups(row, exists, codes, groups, slot, head_idx, config.scales ? *scales.data : 1.0f);
      } else {
        float inverse = 1;
        if constexpr (config.token_scales) {
          constexpr float least = 0x1p-100f, finite = __builtin_bit_cast(float, 0x7f7fffffu);
          const float found = row.largest(), most = ptx::max(least, found < finite ? found : finite);
          const float scale = most / tile::largest_code<config.cache_dtype>;
          inverse = 1 / scale;
          if (exists && lane == 0) {
            const_cast<float*>(scales.data)[slot.page * scales.batch_stride + slot.row * scales.seq_stride +
                                            head_idx * scales.head_stride] = scale;
          }
        } else if constexpr (config.scales) {
          if (exists) inverse = 1 / scales.data[token.batch_idx * scales.batch_stride + head_idx * scales.head_stride];
        }
        if constexpr (config.scales) {
#pragma unroll
          for (int e = 0; e < Row::each; ++e)
#pragma unroll
            for (int i = 0; i < Row::width; ++i) row.x[e][i] *= inverse;
        }
        if (exists) row.template store<config.cache_dtype>(lane, to + head_idx * cache.head_stride);
      }
    };
    for_each_head<norm, Row>(source, token, idx, args.tokens_new, first, args.heads_kv, weight, write);
  }

  __device__ __forceinline__ void work() const {
    const int of_query = abi::append_tasks(args.heads_q, args.heads_of_task);
    const int of_key = abi::append_tasks(args.heads_kv, args.heads_of_task);
    long long task = static_cast<long long>(blockIdx.x) * (abi::append_threads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (task < of_query * args.tokens_q)
      return queries(task / of_query, static_cast<int>(task % of_query) * args.heads_of_task);
    task -= of_query * args.tokens_q;
    const long long keys = of_key * args.tokens_new;
    if (task < keys) {
      return cache_rows<Key, config.k_norm>(task / of_key, static_cast<int>(task % of_key) * args.heads_of_task, args.K,
                                            args.K_cache, args.K_scale, args.K_groups, args.k_weight);
    }
    task -= keys;
    if constexpr (!config.in_rows) {
      if (task < keys) {
        cache_rows<Value, false>(task / of_key, static_cast<int>(task % of_key) * args.heads_of_task, args.V, args.V_cache,
                                 args.V_scale, args.V_groups, nullptr);
      }
    }
  }
};

template <abi::AppendConfig config>
__device__ __forceinline__ void decode_append(const abi::AppendArgs& args) {
  DecodeAppend<config>{args}.work();
}

}  // namespace flash_attention
