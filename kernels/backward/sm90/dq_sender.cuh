#pragma once

// The warp that adds dQ of a warpgroup's steps to the sums in memory, while the warpgroup computes the next.

#include "backward/sm90/ordered_accumulate.cuh"
#include "backward/sm90/storage.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

/// One lane of a warpgroup's sender, a warp that adds the dQ it is given to the sums in memory.
template <BackwardConfig config>
__device__ __forceinline__ void send_all_dQ(const AttentionArgs& args, SharedStorage<config>& shared, int warpgroup) {
  constexpr int width = Shape<config>::width;
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(shared.dQ_full[warpgroup], n % 2);  // dQ has been written
    if (shared.dQ_step[warpgroup] == no_step) return;
    const Step& step = shared.step[shared.dQ_step[warpgroup] % steps_kept];
    const long long padded = step.padded;
    const unsigned key_tile = step.key_tile;
    float* const sums = workspace<float>(args, Region::dQ) + padded * width;
    if (!Shape<config>::ordered || wait_for_order(dq_order_of(args, padded), key_tile)) {
      if (Shape<config>::ordered) ptx::path<"backward/sm90 dQ added in order">();
      ptx::bulk_reduce_add(sums, shared.dQ[warpgroup], tile_rows * width * 4);
    } else {
      ptx::path<"backward/sm90 dQ stored by the first">();
      ptx::bulk_store(sums, shared.dQ[warpgroup], tile_rows * width * 4);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(shared.dQ_empty[warpgroup]);
    if constexpr (Shape<config>::ordered) signal_next(dq_order_of(args, padded), key_tile - 1);
  }
}

}  // namespace flash_attention::backward_sm90
