#pragma once

#include "tile/sequence.cuh"

// The rows of packed tensors that belong to no sequence: those from cu_seqlens[batch] on. They are written as rows that
// see nothing. The blocks of the grid share them; nearly always there are none.

namespace flash_attention::tile {

template <typename Element>
__device__ __forceinline__ void clear_rows(const TensorView& view, int begin, int end, int heads, int dim, int thread,
                                           int threads) {
#pragma unroll 1
  for (long long row = begin + static_cast<long long>(blockIdx.x); row < end; row += gridDim.x) {
#pragma unroll 1
    for (int head_idx = 0; head_idx < heads; ++head_idx) {
      auto* to = static_cast<Element*>(view.data) + row * view.seq_stride + head_idx * view.head_stride;
#pragma unroll 1
      for (int d = thread; d < dim; d += threads) to[d] = Element{};
    }
  }
}

/// Clears O and lse. `threads` threads of each block call it.
template <auto config>
__device__ __forceinline__ void clear_output_tail(const AttentionArgs& args, int thread, int threads) {
  if constexpr (config.features.packed) {
    const int begin = args.cu_seqlens_q[args.batch], end = args.total_q;
    if (begin >= end) return;
    clear_rows<ptx::Element<config.features.dtype>>(args.O, begin, end, args.heads_q, config.head_dim_v, thread, threads);
    if constexpr (config.features.entropy) {
#pragma unroll 1
      for (int head_idx = blockIdx.x; head_idx < args.heads_q; head_idx += gridDim.x) {
#pragma unroll 1
        for (int row = begin + thread; row < end; row += threads)
          args.entropy[static_cast<long long>(head_idx) * args.total_q + row] = 0;
      }
    }
    if (args.lse == nullptr) return;
#pragma unroll 1
    for (int head_idx = blockIdx.x; head_idx < args.heads_q; head_idx += gridDim.x) {
#pragma unroll 1
      for (int row = begin + thread; row < end; row += threads)
        args.lse[static_cast<long long>(head_idx) * args.total_q + row] = -infinity;
    }
  }
}

/// Clears the tangents of O and lse, if they are wanted.
template <auto config>
__device__ __forceinline__ void clear_tangent_tail(const AttentionArgs& args, int thread, int threads) {
  if constexpr (config.features.packed) {
    const int begin = args.cu_seqlens_q[args.batch], end = args.total_q;
    TensorView to = args.O;
    to.data = args.O_tangent;
    if (to.data != nullptr)
      clear_rows<ptx::Element<config.features.dtype>>(to, begin, end, args.heads_q, config.head_dim_v, thread, threads);
#pragma unroll 1
    for (int head_idx = blockIdx.x; args.lse_tangent != nullptr && head_idx < args.heads_q; head_idx += gridDim.x) {
#pragma unroll 1
      for (int row = begin + thread; row < end; row += threads)
        args.lse_tangent[static_cast<long long>(head_idx) * args.total_q + row] = 0;
    }
  }
}

/// Clears key masses.
template <auto config>
__device__ __forceinline__ void clear_key_mass_tail(const AttentionArgs& args, int thread, int threads) {
  if constexpr (config.features.packed) {
    const int begin = args.cu_seqlens_kv[args.batch], end = args.total_kv;
#pragma unroll 1
    for (int head_idx = blockIdx.x; begin < end && head_idx < args.heads_q; head_idx += gridDim.x) {
#pragma unroll 1
      for (int key = begin + thread; key < end; key += threads)
        args.key_mass[static_cast<long long>(head_idx) * args.total_kv + key] = 0;
    }
  }
}

/// Clears dQ, dK and dV.
template <auto config>
__device__ __forceinline__ void clear_gradient_tails(const AttentionArgs& args, int thread, int threads) {
  if constexpr (config.features.packed) {
    using Element = ptx::Element<config.features.dtype>;
    const int q_begin = args.cu_seqlens_q[args.batch], kv_begin = args.cu_seqlens_kv[args.batch];
    clear_rows<Element>(args.dQ, q_begin, args.total_q, args.heads_q, config.head_dim, thread, threads);
    clear_rows<Element>(args.dK, kv_begin, args.total_kv, args.heads_kv, config.head_dim, thread, threads);
    clear_rows<Element>(args.dV, kv_begin, args.total_kv, args.heads_kv, config.head_dim_v, thread, threads);
  }
}

}  // namespace flash_attention::tile
