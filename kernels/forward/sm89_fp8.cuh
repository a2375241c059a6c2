#pragma once

#include "forward/sm80/kernel.cuh"
#include "ptx/pairs.cuh"

// Attention forward with Q, K and V in 8 bits (e4m3 or e5m2) by mma.sync: sm_89 and up, O of 16 bits.
//
// It is forward/sm80 with products of codes: the same loop, copies, scores and epilogue.
//
//     for each KV block:  S = Q K^T;  P = e4m3(2^8 softmax step);  O = O * rescale + P V
//     O * V's scale / sum, lse -> global
//
// The tensor core keeps about 14 bits of a sum of 8-bit products. So P V of a block is a sum of its own, which is added to
// O in fp32; O's rescaling is part of that addition.
//
// An 8-bit product needs its contracted index contiguous in both operands. In P V it is the key, and V has its columns
// contiguous. ldmatrix transposes pairs of bytes: of keys 2t and 2t + 1, a lane receives columns 2g and 2g + 1. Two such
// registers, of keys 2t, 2t + 1 and 2t + 8, 2t + 9, are sorted by bytes (prmt) into one of column 2g and one of column
// 2g + 1, each with four keys. These are the four keys of each 16 that the lane has of P: a product does not mind in which
// order its terms come, so no byte of P moves between lanes.

namespace flash_attention {

/// P as A operands, 32 keys a step.
template <int steps, typename Scores>
__device__ __forceinline__ void pack_codes(unsigned (&A)[steps][4], const Scores& P) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* even = P[4 * step + i / 2 * 2] + i % 2 * 2;
      const float* odd = P[4 * step + i / 2 * 2 + 1] + i % 2 * 2;
      A[step][i] = ptx::to_e4m3_pair(even[0], even[1]) | static_cast<unsigned>(ptx::to_e4m3_pair(odd[0], odd[1])) << 16;
    }
  }
}

/// O[m][2 n] has the even columns of 16 n ... 16 n + 15, O[m][2 n + 1] the odd ones.
template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::add_code_values(const Scores& P, const float (&rescale)[m_tiles][2]) {
  constexpr int steps = block_kv / 32;
  unsigned A[m_tiles][steps][4];
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) pack_codes(A[m], P[m]);
  const unsigned V_address = V_smem + VTile::offset(ptx::hide_from_compiler(lane), 0);  // 16 columns of 32 keys
#pragma unroll
  for (int n = 0; n < dim_v / 16; ++n) {
    unsigned even[steps][2], odd[steps][2];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      unsigned V[4];  // keys 8 i + 2t and 8 i + 2t + 1, columns 2g and 2g + 1
      ptx::ldmatrix_x4_trans(V, VTile::step(V_address, n) + step * 32 * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        even[step][i] = ptx::permute_bytes(V[2 * i], V[2 * i + 1], 0x6420u);
        odd[step][i] = ptx::permute_bytes(V[2 * i], V[2 * i + 1], 0x7531u);
      }
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      float sum[2][4]{};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        ptx::mma_m16n8k32<Type::e4m3, key_type(features)>(sum[0], A[m][step], even[step]);
        ptx::mma_m16n8k32<Type::e4m3, key_type(features)>(sum[1], A[m][step], odd[step]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& o = O[m][2 * n + e / 4][e % 4];
        o = ptx::fma(o, rescale[m][e % 4 / 2], sum[e / 4][e % 4]);
      }
    }
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void forward_sm89_fp8(const AttentionArgs& args) {
  static_assert(config.features.narrow_queries && config.features.dtype != Type::float32);
  static_assert(!config.features.token_scales && config.block_kv % 32 == 0);
  forward_sm80<config>(args);
}

}  // namespace flash_attention
