#pragma once

#include "forward/sm80/kernel.cuh"
#include "tile/split.cuh"

// Attention forward of float32 on tensor cores (precision tf32 or auto): sm_80 and up, the whole contract.
//
// It is forward/sm80 with floats split in two parts each (tile/split.cuh): the same loop, copies, scores and epilogue.
//
//     for each KV block:  S = Q K^T;  P = softmax step;  O = O * rescale + P V
//     O / sum, lse -> global
//
// Q is read from shared memory and split again for each KV block. Probabilities stay in registers between the products,
// which requires another order of V's rows in the second product.

namespace flash_attention {

template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::multiply_split_keys(Scores& S) const {
  const unsigned K_address = tile::b_transposed_address<KTile>(K_smem, 0, ptx::hide_from_compiler(lane));
  tile::multiply_split<features, q_steps, 1>(
      S, tile::split_rows([&](unsigned(&A)[4], int m, int step) { read_Q(A, m, step); }),
      [&](unsigned(&B)[4], int n, int step) { ptx::ldmatrix_x4(B, KTile::step(K_address, 2 * step) + n * 16 * 128); });
}

template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::add_split_values(const Scores& P) {
  const unsigned V_address = tile::contracted_address<VTile>(V_smem, ptx::hide_from_compiler(lane));
  tile::multiply_split<features, block_kv / 8, block_kv / 16>(
      O, [&](auto& A, int m, int step) { tile::split_a(A, P[m][step]); },
      [&](unsigned(&B)[4], int n, int step) { tile::contracted_rows<VTile>(B, V_address, n, step); });
}

template <ForwardConfig config>
__device__ __forceinline__ void forward_tf32(const AttentionArgs& args) {
  static_assert(config.features.dtype == Type::float32);
  forward_sm80<config>(args);
}

}  // namespace flash_attention
