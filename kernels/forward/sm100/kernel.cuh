#pragma once

// Attention forward for sm_100 (Blackwell): TMA, tcgen05, tensor memory, a role for each warpgroup.
//
// The grid is persistent: a thread block takes one work tile after another, 256 queries of one head as two Q tiles of 128
// rows (or 128 queries as one). It visits the KV blocks of 128 keys that they see from the last to the first. Roles:
//
//   warpgroups 0, 1   softmax of Q tile 0 and 1, a thread for each row            softmax.cuh
//   next warpgroup    rescales O, stores it                                       output.cuh
//   last warpgroup    warp 0 multiplies, warp 1 loads, the rest clears rows of
//                     no sequence                                                 multiply.cuh, load.cuh
//
//     for each KV block:                              by           told by
//       K, V -> shared memory                         load         K_full, V_full
//       S = Q K^T            in tensor memory         multiply     S_full
//       max, P = 2^(S - max) over S                   softmax      P_ready, mail_full (how much O shrinks)
//       O = O * 2^(old max - max), if that is not 1   output       P_ready
//       O += P V             in tensor memory         multiply     O_done, V_empty
//     O / sum, lse -> global memory                   output
//
// Two Q tiles are in turn: one has its softmax while the products of the other run. By the rates of the machine the two
// products of a Q tile and a block take 1024 cycles at head_dim 128, and its 16384 exponentials take as many.
//
// Tensor memory (Shape): S 0 and S 1 of 128 columns, then O 0 and O 1 of head_dim_v columns. All of it is allocated, so one
// block runs on an SM. setmaxnreg moves registers from the last two warpgroups to the softmax.

#include "forward/sm100/load.cuh"
#include "forward/sm100/multiply.cuh"
#include "forward/sm100/output.cuh"
#include "forward/sm100/softmax.cuh"
#include "ptx/registers.cuh"
#include "tile/tail.cuh"

namespace flash_attention {
namespace forward_sm100 {

/// The last warpgroup.
template <ForwardConfig config>
__device__ __forceinline__ void load_and_multiply(const AttentionArgs& args, SharedStorage<config>& shared, unsigned base,
                                                  int warp) {
  const int thread = static_cast<int>(threadIdx.x) % wg_threads;
  if (warp == 0) {
    if (ptx::elect()) {
      Multiplier<config> multiplier{shared, base};
      for_tiles<config>(args, [&](const Tile<config>& tile) { multiplier.multiply(tile); });
    }
  } else if (warp == 1) {
    if (ptx::elect()) {
      Loader<config> loader{args, shared};
      for_tiles<config>(args, [&](const Tile<config>& tile) { loader.load(tile); });
      loader.finish();
    }
  } else {
    tile::clear_output_tail<config>(args, thread - 64, 64);
  }
  __syncwarp();  // bar.sync needs the lanes of a warp together; not found by the emulator: it does not look for that
}

}  // namespace forward_sm100

template <abi::ForwardConfig config>
__device__ __forceinline__ void forward_sm100_kernel(const abi::AttentionArgs& args) {
  using namespace forward_sm100;
  using S = Shape<config>;
  static_assert(fits_layout<config>, "the planner reserves what SharedStorage needs");
  constexpr ForwardSm100Registers registers{};
  auto& shared = ptx::shared_storage<SharedStorage<config>>();
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / wg_threads, 0);  // the compiler knows: uniform
  const int warp = ptx::shuffle(static_cast<int>(threadIdx.x) % wg_threads / 32, 0);

  if (threadIdx.x == 0) init_barriers(shared);
  if (warpgroup == S::warpgroups - 1 && warp == 0) {
    ptx::tmem_alloc<S::tensor_columns>(shared.tensor_base);
    ptx::tmem_relinquish();
  }
  __syncthreads();  // all see the barriers, and where tensor memory is
  const unsigned base = ptx::load_shared<unsigned>(ptx::shared_address(&shared.tensor_base));

  if (warpgroup < S::q_tiles) {
    ptx::registers_increase<registers.softmax>();
    Softmax<config> softmax(args, shared, warpgroup, base);
    for_tiles<config>(args, [&](const Tile<config>& tile) { softmax.attend(tile); });
  } else if (warpgroup == S::q_tiles) {
    ptx::registers_decrease<registers.output>();
    Output<config> output{args, shared, base};
    for_tiles<config>(args, [&](const Tile<config>& tile) { output.complete(tile); });
  } else {
    ptx::registers_decrease<registers.load>();
    load_and_multiply(args, shared, base, warp);
  }

  ptx::tcgen05_fence_before();
  __syncthreads();  // nobody uses tensor memory any more
  if (warpgroup == S::warpgroups - 1 && warp == 0) {
    ptx::tcgen05_fence_after();
    ptx::tmem_dealloc<S::tensor_columns>(base);
  }
}

}  // namespace flash_attention
