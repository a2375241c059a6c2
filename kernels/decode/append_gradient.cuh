#pragma once

#include "decode/append_row.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"

// Gradients of rows that decode/append has normalised and rotated.
//
//   for each token, its heads:      g = the gradient, rotated back;  y = x / rms;  z = g * weight
//     dx = (z - y * mean(z * y)) / rms,  the weights' gradient += g * y           without a norm: dx = g
//   a block adds its rows' terms of the weights in a fixed order, append_weights those of the blocks: always the same bits

namespace flash_attention {

template <abi::AppendConfig config>
struct DecodeAppendGradient {
  static constexpr int lanes = config.lanes, rows_of_warp = 32 / lanes, warps = abi::append_threads / 32;
  using Element = tile::Stored<config.dtype>;
  using Row = decode::AppendRow<config, config.head_dim, (config.rotary_dim > 0)>;
  struct Storage {
    float sums[warps][config.head_dim];
  };

  const abi::AppendGradientArgs& given;
  const abi::AppendArgs& args = given.rows;
  int lane = static_cast<int>(threadIdx.x) % lanes;
  int own = static_cast<int>(threadIdx.x) % 32 / lanes;
  int warp = static_cast<int>(threadIdx.x) / 32;

  struct Rows {
    const abi::TensorView &x, &dout, &dx;
    const int* starts;
    int seq;
    bool one_angle;
    long long tokens;
    int heads;
    const void* weight;
    float* sums;
  };

  template <bool norm>
  __device__ __forceinline__ void head(const Rows& rows, const decode::Token& token, int head_idx, bool exists,
                                       const decode::Angles<config, Row>& angles, const Row& weights, Row& sums) const {
    Row gradient;
    gradient.fill(0);
    if (exists && token.exists) {
      gradient.load(lane, static_cast<const Element*>(rows.dout.data) + decode::offset_of(rows.dout, token) +
                              head_idx * rows.dout.head_stride);
      angles.template turn<true>(gradient, lane);
    }
    if constexpr (norm) {
      Row x;
      x.fill(0);
      if (exists && token.exists) {
        x.load(lane,
               static_cast<const Element*>(rows.x.data) + decode::offset_of(rows.x, token) + head_idx * rows.x.head_stride);
      }
      const float inverse = x.inverse_rms(args.norm_eps);
#pragma unroll
      for (int e = 0; e < Row::each; ++e)
#pragma unroll
        for (int i = 0; i < Row::width; ++i) {
          x.x[e][i] *= inverse;
          sums.x[e][i] += gradient.x[e][i] * x.x[e][i];
          gradient.x[e][i] *= weights.x[e][i];
        }
      const float mean = Row::sum([&](int e, int i) { return gradient.x[e][i] * x.x[e][i]; }) / Row::dim;
#pragma unroll
      for (int e = 0; e < Row::each; ++e)
#pragma unroll
        for (int i = 0; i < Row::width; ++i) gradient.x[e][i] = (gradient.x[e][i] - x.x[e][i] * mean) * inverse;
    }
    if (exists) {
      gradient.template store<config.dtype>(
          lane, static_cast<Element*>(rows.dx.data) + decode::offset_of(rows.dx, token) + head_idx * rows.dx.head_stride);
    }
  }

  template <bool norm>
  __device__ __forceinline__ void all(const Rows& rows) const {
    Row weights, sums;
    sums.fill(0);
    if constexpr (norm) weights.load_weights(lane, rows.weight);
    const int of_token = abi::append_tasks(rows.heads, args.heads_of_task);
    const long long step = static_cast<long long>(given.blocks) * warps;
    for (long long task = static_cast<long long>(blockIdx.x) * warps + warp; task < of_token * rows.tokens; task += step) {
      const long long idx = task / of_token;
      const decode::Token token = decode::token_of(args, idx, rows.starts, rows.seq, rows.one_angle);
      decode::Angles<config, Row> angles;
      if (token.exists) angles.load(args, lane, token, idx, rows.tokens);
      const int first = static_cast<int>(task % of_token) * args.heads_of_task;
      const int last = tile::min(first + args.heads_of_task, rows.heads);
      for (int at = first; at < last; at += rows_of_warp)
        head<norm>(rows, token, at + own, at + own < last, angles, weights, sums);
    }
    if constexpr (norm) {
      if (rows.sums != nullptr) add(sums, rows.sums);
    }
  }

  /// Adds up the block's sums: over the rows of a warp, then over warps.
  __device__ __forceinline__ void add(Row& sums, float* to) const {
#pragma unroll
    for (int e = 0; e < Row::each; ++e)
#pragma unroll
      for (int i = 0; i < Row::width; ++i)
#pragma unroll
        for (int step = lanes; step < 32; step *= 2) sums.x[e][i] += ptx::shuffle_xor(sums.x[e][i], step);
    Storage& shared = ptx::shared_storage<Storage>();
    ptx::barrier_sync(0, abi::append_threads);  // no thread still reads the last call's sums
    if (own == 0) sums.template store<abi::Type::float32>(lane, shared.sums[warp]);
    ptx::barrier_sync(0, abi::append_threads);
    for (int column = static_cast<int>(threadIdx.x); column < config.head_dim; column += abi::append_threads) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) total += shared.sums[i][column];
      to[static_cast<long long>(blockIdx.x) * config.head_dim + column] = total;
    }
  }

  __device__ __forceinline__ void work() const {
    all<config.q_norm>({args.Q, given.dQ_out, given.dQ, args.cu_seqlens_q, args.seq_q, args.one_query != 0, args.tokens_q,
                        args.heads_q, args.q_weight, given.q_weight_sums});
    all<config.k_norm>({args.K, given.dK_out, given.dK, args.cu_seqlens_new, args.seq_new, false, args.tokens_new,
                        args.heads_kv, args.k_weight, given.k_weight_sums});
  }
};

template <abi::AppendConfig config>
__device__ __forceinline__ void decode_append_gradient(const abi::AppendGradientArgs& args) {
  DecodeAppendGradient<config>{args}.work();
}

/// Adds up the gradients of the weights, 32 columns a block: each warp adds the sums of some blocks, the first warp
/// those of the warps.
template <abi::AppendConfig config>
__device__ __forceinline__ void decode_append_weights(const abi::AppendGradientArgs& args) {
  constexpr int warps = abi::append_weights_threads / 32;
  struct Storage {
    float sums[warps][32];
  };
  const bool query = blockIdx.y == 0;
  const float* from = query ? args.q_weight_sums : args.k_weight_sums;
  float* to = query ? args.dq_weight : args.dk_weight;
  if (from == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  float total = 0;
  if (column < config.head_dim) {
#pragma unroll 8
    for (int block = warp; block < args.blocks; block += warps)
      total += from[static_cast<long long>(block) * config.head_dim + column];
  }
  Storage& shared = ptx::shared_storage<Storage>();
  shared.sums[warp][lane] = total;
  ptx::barrier_sync(0, abi::append_weights_threads);
  if (warp != 0 || column >= config.head_dim) return;
  total = 0;
#pragma unroll
  for (int i = 0; i < warps; ++i) total += shared.sums[i][lane];
  to[column] = total;
}

}  // namespace flash_attention
