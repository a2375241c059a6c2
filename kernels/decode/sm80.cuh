#pragma once

#include "decode/consumer.cuh"
#include "decode/load.cuh"
#include "tile/tail.cuh"

// Attention forward for few queries, where reading K and V once is all the work: mma.sync and cp.async, sm_80 and up,
// 16-bit types, K and V in pages or not.
//
// The rows of all query heads of a key head, of some query tokens, are one tile: row = token * group + head in group. The
// tiles of keys of all sequences and key heads are shared out evenly (decode/schedule.cuh): one launch, as many blocks as
// the GPU holds. A block:
//
//   tiles [begin, end) of all;  num_stages - 1 of them in flight
//   for each item (rows of a key head) that these belong to:
//     Q -> shared -> registers
//     for each tile of block_kv keys:
//       prefetch one more tile;  wait for the oldest
//       each warp, its own keys:   S = Q K^T;  P = softmax step;  O = O * rescale + P V
//     finish: the warps' O, maxima and sums together -> O, lse, or a part of them (decode/finish.cuh)
//
// With 16 rows or fewer a warp reads what it has copied itself, so that the loop over tiles has no barrier at all.

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct DecodeSm80 {
  using Consumer = decode::Consumer<config>;
  static constexpr int stages = config.num_stages;

  /// What a warp has copied is read by the warp alone, or a stage belongs to all.
  struct Gate {
    __device__ __forceinline__ void K_ready() const {  // and V: one group of copies
      ptx::copy_async_wait<stages - 1>();
      sync_readers();  // the tile has landed, from all copies of those who read it
    }
    __device__ __forceinline__ void K_read() const {}
    __device__ __forceinline__ void V_ready() const {}
    __device__ __forceinline__ void V_read() const { sync_readers(); }  // the next copies may go there

    __device__ __forceinline__ static void sync_readers() {
      if constexpr (Consumer::layout.row_warps == 1 && config.key_groups == 1) {
        __syncwarp();
      } else {  // rows of several warps, or stages that both groups of warps use in turn
        ptx::path<"decode/sm80 rows of several warps">();
        __syncthreads();
      }
    }
  };

  __device__ __forceinline__ static int after(int stage) { return stage + 1 == stages ? 0 : stage + 1; }

  /// One loop over the block's tiles, with one place that loads: the code is short, and fetched while memory is idle.
  __device__ __forceinline__ static void work(const AttentionArgs& args, typename Consumer::SharedStorage& storage) {
    const decode::Run<config> run(args);
    if (run.begin == run.end) return;
    decode::Loader<config> loader(args, run, storage.loading[threadIdx.x / 32]);
    Consumer consumer(args, storage, run);
    int stage = 0, free_stage = 0;
#pragma unroll 1
    for (int position = run.begin - (stages - 1); position < run.end; ++position) {
      loader.load(consumer.K_smem(free_stage), consumer.V_smem(free_stage), consumer.scale_smem(free_stage));
      free_stage = after(free_stage);
      if (position < run.begin) continue;  // the first tiles are in flight
      consumer.take(position, stage, Gate{});
      stage = after(stage);
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void decode_sm80(const AttentionArgs& args) {
  tile::clear_output_tail<config>(args, threadIdx.x, 32 * config.num_warps);
  DecodeSm80<config>::work(args, ptx::shared_storage<typename decode::Consumer<config>::SharedStorage>());
}

}  // namespace flash_attention
