#pragma once

// Keeps NaN and Inf of hidden keys out of dQ. dQ = dS K multiplies every key by dS of every query of the tile. dS of a
// hidden score is 0, but 0 * NaN is NaN. So rows of K that hold NaN or Inf, and rows that no query may see, become
// zeros in shared memory before that product reads them. Queries that do see such a key must still get NaN: either
// ScoreMath sets it (nonfinite_row), or S was computed before the key was cleared. docs/kernels/nonfinite.md explains
// all of it.

#include "backward/sm90/parts/storage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flash_attention::backward_sm90 {

/// For K of a task, which stays in shared memory: each warpgroup clears rows of its own 64 keys, two threads a row.
template <BackwardConfig config>
__device__ __forceinline__ void zero_nonfinite_keys(const Warpgroup<config>& wg) {
  using S = Shape<config>;
  const int thread = fresh_thread();
  const int row = thread / 2;
  const bool hidden = wg.task().kv_begin + wg.index * tile_rows + row >= wg.task().sequence.visible_kv;
  unsigned bits = 0;
#pragma unroll
  for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
    for (int piece = thread % 2; S::checks_keys && piece < 8; piece += 2) {
      const auto words =
          ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(wg.shared.K[wg.index][c]), row, piece));
#pragma unroll
      for (int x = 0; x < 4; ++x) bits |= not_finite<S::type>(words[x]);
    }
  }
  const unsigned nonfinite_lanes = ptx::ballot(bits != 0);
  if (S::checks_keys && (hidden || (nonfinite_lanes >> (thread % 32 & ~1) & 3) != 0)) {
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = thread % 2; piece < 8; piece += 2)
        ptx::store_shared(swizzled(ptx::shared_address(wg.shared.K[wg.index][c]), row, piece), ptx::Vector<unsigned, 4>{});
    }
  }
  if constexpr (S::checks_keys)
    // the zeros are visible to the products; the emulator does not miss this fence: signal_owner has one, too
    ptx::fence_async_shared();
  if (thread % 32 == 0) wg.shared.nonfinite_lanes[wg.index][thread / 32] = nonfinite_lanes;
  // The owner of a step multiplies the keys of all warpgroups.
  ptx::barrier_sync(barrier_keys, S::warpgroups * wg_threads);
}

/// For K of a stage, once its S is computed: S already has the effect of each key on the queries that see it. Only
/// tiles at an edge of the mask need it. The two warpgroups share the stage and call this from different places in the
/// code. Four threads clear a row.
template <class W>
__device__ __forceinline__ void zero_nonfinite_keys_of_stage(const W& wg, int stage, int visible_rows) {
  using S = typename W::S;
  ptx::barrier_sync_apart(W::barrier_keys, W::warpgroups * wg_threads);  // both warpgroups have their S
  const int row = wg.index * (tile_rows / 2) + wg.thread / 4;            // four threads share a row
  bool nonfinite = row >= visible_rows;
#pragma unroll 1
  for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
    for (int piece = wg.thread % 4; piece < 8; piece += 4) {
      const auto words =
          ptx::load_shared<ptx::Vector<unsigned, 4>>(swizzled(ptx::shared_address(wg.shared.K[stage][c]), row, piece));
#pragma unroll
      for (int x = 0; x < 4; ++x) nonfinite = nonfinite || !finite<S::type>(words[x]);
    }
  }
  const unsigned nonfinite_lanes = ptx::ballot(nonfinite);
  if ((nonfinite_lanes >> (wg.thread % 32 & ~3) & 15) != 0) {
#pragma unroll 1
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int piece = wg.thread % 4; piece < 8; piece += 4) {
        ptx::store_shared(swizzled(ptx::shared_address(wg.shared.K[stage][c]), row, piece), ptx::Vector<unsigned, 4>{});
      }
    }
  }
  // the zeros are visible to the products that read them
  ptx::fence_async_shared();
  ptx::barrier_sync_apart(W::barrier_keys, W::warpgroups * wg_threads);  // both warpgroups have written their zeros
}

}  // namespace flash_attention::backward_sm90
