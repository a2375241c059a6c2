#pragma once

// Forward mode with wgmma and cp.async: sm_90, 16-bit types, heads of up to 128 columns. It has the loop of tangent/sm80
// with other products: a warpgroup has 64 queries, its accumulators are those of four warps of 16, and K, V and their
// tangents are read by descriptors instead of ldmatrix. Widths are filled up with zeros to 64 or 128.
//
// A thread block is two warpgroups. Behind the barrier of a KV block the tensor cores compute the scores of one and then of
// the other, so that the softmax of each runs under products of the other one.

#include "ptx/wgmma.cuh"
#include "tangent/sm80/kernel.cuh"
#include "tile/descriptor.cuh"

namespace flash_attention {

namespace tangent_sm90_parts {

/// An accumulator in the form of wgmma's operand.
template <int blocks>
__device__ __forceinline__ float (&flat(float (&tile)[1][blocks][4]))[4 * blocks] {
  return reinterpret_cast<float(&)[4 * blocks]>(tile);
}

/// The offset of 16 columns of a tile, in bytes.
template <class Tile>
__device__ constexpr int column_offset(int step) {
  return step / 4 * Tile::panel_bytes + step % 4 * 32;
}

}  // namespace tangent_sm90_parts

/// S = Q K^T, S. = Q. K^T + Q K.^T.
template <ForwardConfig config, bool warpgroups>
template <bool has_Q, bool has_K>
__device__ __forceinline__ void TangentSm80<config, warpgroups>::multiply_keys_wgmma(Scores& S, Scores& S_tangent,
                                                                                     const Stage& stage) const {
  using namespace tangent_sm90_parts;
  using Descriptor = tile::Descriptor<true>;
  const int own_rows = warp_row / 64 * 64 * 128;
  const Descriptor Q_rows(ptx::wgmma_descriptor(storage.Q.bytes + own_rows, 0, 1024));
  const Descriptor Q_tangent_rows(ptx::wgmma_descriptor(storage.Q_tangent.bytes + own_rows, 0, 1024));
  const Descriptor K(ptx::wgmma_descriptor(stage.K.bytes, 0, 1024));
  const Descriptor K_tangent(ptx::wgmma_descriptor(stage.K_tangent.bytes, 0, 1024));
  const auto add = [&](float(&D)[block_kv / 2], const auto& held, const Descriptor& queries, const Descriptor& keys,
                       bool accumulate) {
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      const unsigned long long B = keys.at(column_offset<KTile>(step));
      if constexpr (Q_in_registers) {
        ptx::wgmma_rs<type, block_kv, ptx::Major::k>(D, held[step], B, accumulate || step != 0);
      } else {
        ptx::wgmma_ss<type, block_kv, ptx::Major::k, ptx::Major::k>(D, queries.at(column_offset<QTile>(step)), B,
                                                                    accumulate || step != 0);
      }
    }
  };
  ptx::wgmma_fence();  // orders the softmax's accesses to these registers before the products'
  add(flat(S), Q, Q_rows, K, false);
  if constexpr (has_Q) add(flat(S_tangent), Q_tangent, Q_tangent_rows, K, false);
  if constexpr (has_K) add(flat(S_tangent), Q, Q_rows, K_tangent, has_Q);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(flat(S));
  ptx::wgmma_pin(flat(S_tangent));
}

/// O += P V, A += W V + P V..
template <ForwardConfig config, bool warpgroups>
template <bool has_V>
__device__ __forceinline__ void TangentSm80<config, warpgroups>::add_values_wgmma(Operand& of_P, Operand& of_W,
                                                                                  const Stage& stage) {
  using namespace tangent_sm90_parts;
  using Descriptor = tile::Descriptor<true>;
  const Descriptor V(ptx::wgmma_descriptor(stage.V.bytes, VTile::panel_bytes, 1024));
  const Descriptor V_tangent(ptx::wgmma_descriptor(stage.V_tangent.bytes, VTile::panel_bytes, 1024));
  ptx::wgmma_fence();  // ordinary instructions have written O, A, P and W
#pragma unroll
  for (int step = 0; step < kv_steps; ++step) {
    ptx::wgmma_rs<type, dim_v, ptx::Major::mn>(flat(O), of_P[step], V.at(step * 16 * 128), true);
    ptx::wgmma_rs<type, dim_v, ptx::Major::mn>(flat(A), of_W[step], V.at(step * 16 * 128), true);
    if constexpr (has_V)
      ptx::wgmma_rs<type, dim_v, ptx::Major::mn>(flat(A), of_P[step], V_tangent.at(step * 16 * 128), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(flat(O));
  ptx::wgmma_pin(flat(A));
  ptx::wgmma_pin(of_P);
  ptx::wgmma_pin(of_W);
}

template <ForwardConfig config>
__device__ __forceinline__ void tangent_sm90(const AttentionArgs& args) {
  using Kernel = TangentSm80<config, true>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, Kernel::threads);
  tile::clear_tangent_tail<config>(args, threadIdx.x, Kernel::threads);
  tangent_sm80_block<config, false, true>(args, storage);
}

}  // namespace flash_attention
