#pragma once

#include "backward/query_sums.cuh"
#include "backward/sm80/kernel.cuh"
#include "backward/sm80_dq.cuh"

// Attention backward of float32 on tensor cores, if precision is not ieee: sm_80 and up, the whole contract.
//
// It is backward/sm80 with products of floats in two parts each (tile/split.cuh, sm80/products.cuh): the same loop, copies,
// scores and epilogue:
//
//     for each query tile that sees some of the block's keys:
//       S = Q K^T,  dP = dO V^T,  P = exp(S - lse),  dS = P * (dP - delta)
//       dV += P^T dO,  dK += dS^T Q,  dQ += dS K in the workspace
//     dK, dV -> global
//
// P and dS go through shared memory as floats and are split where they are multiplied.

namespace flash_attention {

template <BackwardConfig config>
__device__ __forceinline__ void backward_tf32(const AttentionArgs& args) {
  backward_sm80<config>(args);
}

/// Computes dQ by itself, with the same bits in every run.
template <BackwardConfig config>
__device__ __forceinline__ void backward_tf32_dq(const AttentionArgs& args) {
  backward_sm80_dq<config>(args);
}

/// Computes dQ from the sums in the workspace.
template <BackwardConfig config>
__device__ __forceinline__ void backward_tf32_finish_dq(const AttentionArgs& args) {
  backward_sm80_finish_dq<config>(args);
}

}  // namespace flash_attention
