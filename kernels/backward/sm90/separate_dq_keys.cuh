#pragma once

// K of the separate dQ kernel in shared memory, made safe for dS K: hidden rows and rows with NaN or Inf become zero.

#include "backward/sm90/products.cuh"
#include "backward/sm90/separate_dq_producer.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::backward_sm90 {

template <BackwardConfig config>
struct QueryKeys {
  using S = Shape<config>;
  static constexpr Type type = S::type;

  const AttentionArgs& args;
  QueryStorage<config>& shared;
  const int warpgroup;
  const int thread;  // in the warpgroup

  /// Zeroes the rows of K in a stage that hold NaN or Inf or belong to no visible key: dS K would multiply them by the
  /// zeros of hidden scores. What they do to the queries that see them is in S by now. The warpgroups come here from
  /// different places.
  __device__ __forceinline__ void zero_nonfinite_keys(int stage, int visible_rows) const {
    ptx::barrier_sync_apart(barrier_query_keys, query_warpgroups * wg_threads);  // both warpgroups have their S
    const int row = warpgroup * (tile_rows / 2) + thread / 4;                    // four threads share a row
    bool nonfinite = row >= visible_rows;
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = thread % 4; piece < 8; piece += 4) {
        const auto words =
            ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(shared.K[stage][c]), row, piece));
#pragma unroll
        for (int x = 0; x < 4; ++x) nonfinite = nonfinite || !finite<type>(words[x]);
      }
    }
    const unsigned nonfinite_lanes = ptx::ballot(nonfinite);
    if ((nonfinite_lanes >> (thread % 32 & ~3) & 15) != 0) {
#pragma unroll 1
      for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
        for (int piece = thread % 4; piece < 8; piece += 4) {
          ptx::store_shared(swizzled(ptx::shared_address(shared.K[stage][c]), row, piece), ptx::Vector<unsigned, 4>{});
        }
      }
    }
    ptx::fence_async_shared();  // the zeros before the products that read them
    ptx::barrier_sync_apart(barrier_query_keys, query_warpgroups * wg_threads);  // those of both warpgroups
  }
};

}  // namespace flash_attention::backward_sm90
