#pragma once

// How fast are warpgroup products of 64 x n x 16? Each warpgroup issues micro_repeat times 4 products into one accumulator,
// as the steps of a real product are. The tensor cores need n / 2 cycles for each.

#include "abi/args.h"
#include "abi/micro.h"
#include "micro/clock.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attention {

template <abi::MicroConfig config>
__device__ __forceinline__ void micro_wgmma(const abi::AttentionArgs& args) {
  constexpr abi::Type type = abi::Type::bfloat16;
  struct alignas(1024) Storage {
    unsigned short A[config.warpgroups][64 * 64];
    unsigned short B[config.n * 64];
  };
  auto& shared = ptx::shared_storage<Storage>();
  auto* words = reinterpret_cast<unsigned*>(&shared);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Storage) / 4); i += blockDim.x) words[i] = 0x3f803f80u;  // 1, 1
  ptx::fence_async_shared();

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / 128, 0);
  const unsigned long long A = ptx::wgmma_descriptor(shared.A[warpgroup], 0, 1024);
  const unsigned long long B = ptx::wgmma_descriptor(shared.B, 0, 1024);
  float D[config.n / 2] = {};
  const unsigned a[4] = {threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x};

  const micro::Clock clock(args);
#pragma unroll 1
  for (int i = 0; i < abi::micro_repeat; ++i) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (config.registers) {
        ptx::wgmma_rs<type, config.n, ptx::Major::k>(D, a, B + 2 * step, true);
      } else {
        ptx::wgmma_ss<type, config.n, ptx::Major::k, ptx::Major::k>(D, A + 2 * step, B + 2 * step, true);
      }
    }
    ptx::wgmma_commit();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(D);
  clock.stop();
  micro::keep(args, D);
}

}  // namespace flash_attention
