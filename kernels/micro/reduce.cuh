#pragma once

// Sums of many blocks in memory, as of dQ in backward: added 4 floats at a time from registers, or by bulk copies of 4 KiB
// from shared memory. All blocks add to the same `total_q` floats at args.lse, each in its own order.

#include "abi/args.h"
#include "abi/micro.h"
#include "micro/clock.cuh"
#include "ptx/atomic.cuh"
#include "ptx/tma.cuh"

namespace flash_attention {

template <abi::MicroConfig config>
__device__ __forceinline__ void micro_reduce(const abi::AttentionArgs& args) {
  constexpr int floats = 1024;  // of a warp at a time: 4 KiB
  constexpr int warps = config.warpgroups * 4;
  auto& shared = ptx::shared_storage<float[warps][floats]>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = lane; i < floats; i += 32) shared[warp][i] = 0;
  ptx::fence_async_shared();

  const int pieces = args.total_q / floats;
  const micro::Clock clock(args);
#pragma unroll 1
  for (int i = 0; i < abi::micro_repeat; ++i) {
    const int piece = static_cast<int>((static_cast<unsigned>(blockIdx.x * warps + warp) * 2654435761u + i) % pieces);
    float* to = args.lse + static_cast<long long>(piece) * floats;
    if constexpr (config.registers) {
#pragma unroll
      for (int j = 0; j < floats / 128; ++j) ptx::reduce_add(to + j * 128 + lane * 4, ptx::Vector<float, 4>{});
    } else {
      if (lane == 0) {
        ptx::bulk_wait_read<1>();
        ptx::bulk_reduce_add(to, shared[warp], floats * 4);
        ptx::bulk_commit();
      }
      __syncwarp();
    }
  }
  if (lane == 0) ptx::bulk_wait<0>();
  clock.stop();
}

}  // namespace flash_attention
