#pragma once

#include "decode/mla_attend.cuh"
#include "decode/mla_codes.cuh"
#include "decode/mla_producer.cuh"
#include "tile/tail.cuh"

// Latent attention (MLA) for few queries, sm_90: wgmma, keys of 576 columns whose first 512 are the values, read once.
//
// Rows are packed, and tiles of keys distributed over thread blocks, as in decode/sm80 (decode/schedule.cuh). A tile has 64
// rows, so O is 64 x 512 floats: two consumer warpgroups hold half of its columns each. KV blocks of 64 keys go through two
// stages; warpgroup w makes the scores of the blocks of stage w, and both add up the values of all blocks:
//
//   for each item of the run:                     Q -> shared                                              mla_scores.cuh
//     for each KV block n, warpgroup w:                                                                  mla_attend.cuh
//       n is of stage w:                          S = Q K^T;  P = softmax step;  P, rescale -> shared     attend_own
//                                                 O_w = O_w * rescale + P V_w
//       n is of the other stage:                  wait for P;  O_w = O_w * rescale + P V_w                issue_other
//     O / sum -> global, or a part of it                                                                 mla_finish.cuh
//
// So the softmax of one warpgroup runs under the products of the other. P takes the place of the key's own columns in the
// stage: they are read no more. The third warpgroup is the producer (mla_producer.cuh, of 8-bit keys mla_codes.cuh).

namespace flash_attention {

template <ForwardConfig config>
__device__ __forceinline__ void decode_mla_sm90(const AttentionArgs& args) {
  using namespace mla;
  using Storage = SharedStorage<config>;
  static_assert(sizeof(Storage) <= mla_shared_bytes, "the planner reserves what SharedStorage needs");
  static_assert(config.head_dim == mla_head_dim && config.head_dim_v == mla_head_dim_v && config.block_q == mla_block_q &&
                config.block_kv == mla_block_kv && config.num_warps == 8 && config.features.latent);
  constexpr bool narrow = is_narrow(key_type(config.features));
  auto& shared = ptx::shared_storage<Storage>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < mla_stages; ++s) {
      for (auto& full : shared.full[s]) ptx::mbarrier_init(full, narrow ? 4 : 1);
      for (auto& empty : shared.empty[s]) ptx::mbarrier_init(empty, 4);
    }
    ptx::mbarrier_init_fence();
  }
  tile::clear_output_tail<config>(args, threadIdx.x, mla_threads);
  {
    const decode::Run<config> run(args);
    if (threadIdx.x == 0) shared.run = run;
  }
  __syncthreads();  // all threads see the barriers and the run
  if (shared.run.begin == shared.run.end) return;
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // known to be the same in a warp
  // Codes are held while they become elements, and coordinates of boxes.
  constexpr bool large = narrow || config.producer_warp;
  if (warpgroup == 2) {
    ptx::registers_decrease<large ? 72 : 56>();
    if constexpr (narrow) {
      CodeProducer<config>{args, shared}.run();
    } else {
      Producer<config>{args, shared}.run();
    }
  } else {
    ptx::registers_increase<large ? 216 : 224>();
    Attend<config>(args, shared).work();
  }
}

}  // namespace flash_attention
