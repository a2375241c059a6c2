#pragma once

// What does it cost if one warpgroup signals another and waits for it? Two warpgroups do so micro_repeat times.

#include "abi/args.h"
#include "abi/micro.h"
#include "micro/clock.cuh"
#include "ptx/mbarrier.cuh"

namespace flash_attention {

template <abi::MicroConfig config>
__device__ __forceinline__ void micro_handoff(const abi::AttentionArgs& args) {
  auto& ready = ptx::shared_storage<ptx::Mbarrier[2]>();
  const int mine = threadIdx.x / 128, other = 1 - mine;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(ready[0], 1);
    ptx::mbarrier_init(ready[1], 1);
    ptx::mbarrier_init_fence();
  }
  const micro::Clock clock(args);
#pragma unroll 1
  for (int i = 0; i < abi::micro_repeat; ++i) {
    if constexpr (config.named) {
      if (i > 0 || mine == 1) ptx::barrier_sync(1 + mine, 256);
      ptx::barrier_arrive(1 + other, 256);
    } else {
      if (mine == 1 || i > 0) ptx::mbarrier_wait(ready[mine], (mine == 1 ? i : i - 1) % 2);
      __syncwarp();
      if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(ready[other]);
    }
  }
  if (config.named && mine == 0) ptx::barrier_sync(1, 256);  // no arrival is left over
  clock.stop();
}

}  // namespace flash_attention
