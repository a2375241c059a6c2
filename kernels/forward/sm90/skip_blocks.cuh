#pragma once

// Blocks that only other warpgroups see.

#include "forward/sm90/bias_boxes.cuh"
#include "forward/sm90/consumer.cuh"
#include "ptx/path.cuh"

namespace flash_attention::forward_sm90 {

/// One block. The ping-pong goes on: issue() is called in the warpgroup's turn. V is loaded after K, but copies land in any
/// order: a stage that is freed while its K is still in flight lets the next wait for that stage return at once.
template <ForwardConfig config, typename Issue>
__device__ __forceinline__ void skip_block(Warpgroup<config>& wg, const Issue& issue) {
  using S = Shape<config>;
  ptx::path<"forward/sm90 skipped block">();
  const PipelineState<S::stages> kv(wg.num_blocks++);
  ptx::mbarrier_wait(wg.shared.K_full[kv.stage], kv.phase);
  ptx::mbarrier_wait(wg.shared.V_full[kv.stage], kv.phase);
  wg.sync_without_pingpong();  // no warp has missed a phase, and all know which block it was
  wg.pingpong_wait();
  issue();
  wg.pingpong_signal();
  wg.release(wg.shared.K_empty[kv.stage]);
  wg.release(wg.shared.V_empty[kv.stage]);
  if constexpr (S::bias_stages > 0) {
    const PipelineState<S::bias_stages> bias(wg.num_blocks - 1);
    if (has_bias_boxes(wg.args)) ptx::mbarrier_wait(wg.shared.bias_full[bias.stage][wg.warpgroup], bias.phase);
    release_biases(wg, wg.num_blocks - 1);
  }
}

template <ForwardConfig config>
__device__ __forceinline__ void skip_blocks(Warpgroup<config>& wg, int blocks) {
#pragma unroll 1
  for (; blocks > 0; --blocks) skip_block(wg, [] {});
}

}  // namespace flash_attention::forward_sm90
