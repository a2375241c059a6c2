#pragma once

#include "backward/query_sums.cuh"
#include "backward/sm80/kernel.cuh"
#include "backward/sm80_dq.cuh"

// Attention backward of float32 with products and sums in fp32, on CUDA cores (precision = ieee): sm_80 and up, the whole
// contract.
//
// It is backward/sm80 with products of tile/fma_product.cuh: the same copies, scores and epilogue. P and dS use the
// same memory, one after the other, so that a tile of 128 keys and 128 columns fits:
//
//     for each query tile that sees some of the block's keys:
//       S = Q K^T,  dP = dO V^T,  P = exp(S - lse),  dS = P * (dP - delta)
//       P -> shared;   dV += P^T dO
//       dS -> shared;  dK += dS^T Q,  dQ += dS K in the workspace
//     dK, dV -> global

namespace flash_attention {

template <BackwardConfig config>
__device__ __forceinline__ void backward_fp32(const AttentionArgs& args) {
  backward_sm80<config>(args);
}

/// Computes dQ by itself, with the same bits in every run.
template <BackwardConfig config>
__device__ __forceinline__ void backward_fp32_dq(const AttentionArgs& args) {
  backward_sm80_dq<config>(args);
}

/// Computes dQ from the sums in the workspace.
template <BackwardConfig config>
__device__ __forceinline__ void backward_fp32_finish_dq(const AttentionArgs& args) {
  backward_sm80_finish_dq<config>(args);
}

}  // namespace flash_attention
