#pragma once

// Biases by TMA (BackwardConfig::bias_boxes). With the queries of a step, TMA loads 64 x 64 biases for each warpgroup.
// Their rows are queries; the warpgroup reads them by ldmatrix (ScoreMath::read_bias). If threads load their own biases
// instead, each instruction reads half a sector of eight lines, and these loads go through the L1 cache, which is the
// same memory that the products read as shared memory.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

/// Whether the address allows a tensor map. If not, each thread loads its own biases.
__device__ __forceinline__ bool has_bias_boxes(const AttentionArgs& args) {
  return reinterpret_cast<unsigned long long>(args.bias.data) % 16 == 0;
}

/// The bytes of biases that a stage waits for.
template <BackwardConfig config>
__device__ __forceinline__ unsigned bias_bytes(const AttentionArgs& args) {
  return config.bias_boxes && has_bias_boxes(args) ? Shape<config>::warpgroups * chunk_bytes : 0;
}

/// For the producer warp: loads the biases of a step.
template <BackwardConfig config, typename Storage, typename Task, typename Step>
__device__ __forceinline__ void load_biases(const AttentionArgs& args, Storage& shared, int stage, const Task& task,
                                            const Step& step) {
  if constexpr (config.bias_boxes) {
    if (!has_bias_boxes(args)) return;
#pragma unroll 1
    for (int w = 0; w < Shape<config>::warpgroups; ++w) {
      ptx::tma_load_4d(shared.biases[stage][w], args.maps[map_bias], shared.full[stage], task.kv_begin + w * tile_rows,
                       step.q_begin, args.bias.head_stride != 0 ? step.head_idx : 0,
                       args.bias.batch_stride != 0 ? task.sequence.batch_idx : 0);
    }
  }
}

/// Arrivals of a warpgroup that free a stage: one of its first thread after the products, and one of each warp after it
/// has read its biases.
template <BackwardConfig config>
constexpr int stage_readers = config.bias_boxes ? 1 + wg_threads / 32 : 1;

/// A warp has read its biases of a stage, or needs none of them.
template <BackwardConfig config, typename Storage>
__device__ __forceinline__ void release_biases(Storage& shared, int stage) {
  if constexpr (config.bias_boxes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.empty[stage]);
  }
}

/// The shared memory for biases.
template <BackwardConfig config>
struct BiasTiles {};
template <BackwardConfig config>
requires(config.bias_boxes) struct BiasTiles<config> {
  alignas(1024) unsigned short biases[Shape<config>::stages][Shape<config>::warpgroups][chunk_elements];
};

}  // namespace flash_attention::backward_sm90
