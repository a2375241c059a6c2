#pragma once

// A consumer warpgroup of forward/sm90_fp8: its state, its two products S = Q K^T and O += P V, and the sums of O in fp32.

#include "forward/sm90/warpgroup.cuh"
#include "forward/sm90_fp8/softmax.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "tile/descriptor.cuh"

namespace flash_attention::forward_sm90_fp8 {

template <ForwardConfig its_config>
struct Warpgroup {
  static constexpr ForwardConfig config = its_config;
  using S = Shape<config>;
  using Descriptor = tile::Descriptor<true>;
  using ScoreTile = typename ScoreMath<config>::Tile;
  using PackedTile = typename Softmax<config>::PackedTile;
  using OutputTile = float[S::width_v / 2];

  // Members that the functions of forward/sm90/warpgroup.cuh use.
  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  int num_tiles = 0;        // finished so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  // -- products ---------------------------------------------------------------------------------------------------------

  /// The descriptor of a tile whose rows have `row_bytes`, which is also the width of the swizzle.
  __device__ __forceinline__ static Descriptor descriptor(const void* tile, int row_bytes) {
    return Descriptor(ptx::wgmma_descriptor(tile, 0, 8 * row_bytes, row_bytes));
  }

  /// Issues scores = Q K^T.
  __device__ __forceinline__ void issue_scores(ScoreTile& scores, int k_stage) const {
    const Descriptor Q = descriptor(shared.Q[q_state(*this).stage][warpgroup], chunk_dim);
    const Descriptor K = descriptor(shared.K[k_stage], chunk_dim);
    ptx::wgmma_fence();  // orders the softmax's accesses to these registers before the product's
#pragma unroll
    for (int step = 0; step < S::steps_qk; ++step) {
      const int chunk = step / 4, inside = step % 4 * 32;
      ptx::wgmma_fp8_ss<S::code, S::code, S::block_kv>(scores, Q.at(chunk * wg_rows * chunk_dim + inside),
                                                       K.at(chunk * S::block_kv * chunk_dim + inside), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V, or O = P V.
  __device__ __forceinline__ void issue_output(OutputTile& O, const PackedTile& P, int v_stage, bool accumulate) const {
    const Descriptor V = descriptor(shared.V[v_stage], S::v_chunk);
    ptx::wgmma_fence();  // ordinary instructions have written O and P
#pragma unroll
    for (int step = 0; step < S::steps_pv; ++step) {
      const int chunk = step * 32 / S::v_chunk, inside = step * 32 % S::v_chunk;
      ptx::wgmma_fp8_rs<S::code, S::width_v>(O, P[step], V.at(chunk * S::width_v * S::v_chunk + inside),
                                             accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  // -- sums in fp32 -----------------------------------------------------------------------------------------------------

  /// This thread's sums, four at a time; neighbouring lanes are adjacent in memory.
  __device__ __forceinline__ unsigned sums_address() const {
    return ptx::shared_address(shared.O[warpgroup]) + static_cast<unsigned>(ptx::hide_from_compiler(thread)) * 16;
  }

  /// The sums share memory with the output. Waits until the previous tile's store has read it.
  __device__ __forceinline__ void take_sums() const {
    if (thread == 0) ptx::bulk_wait_read<0>();
    sync(*this);
  }
  /// sums = O, or sums = sums * factor + O.
  __device__ __forceinline__ void flush(const OutputTile& O, const float (&factor)[2], bool first) const {
    const unsigned address = sums_address();
#pragma unroll
    for (int i = 0; i < S::width_v / 2; i += 4) {
      ptx::Vector<float, 4> sums{O[i], O[i + 1], O[i + 2], O[i + 3]};
      if (!first) {
        const auto old = ptx::load_shared<ptx::Vector<float, 4>>(address + i / 4 * wg_threads * 16);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = ptx::fma(old[e], factor[e / 2], sums[e]);
      }
      ptx::store_shared(address + i / 4 * wg_threads * 16, sums);
    }
  }
  /// O += factor * sums.
  __device__ __forceinline__ void add_sums(OutputTile& O, const float (&factor)[2]) const {
    const unsigned address = sums_address();
#pragma unroll
    for (int i = 0; i < S::width_v / 2; i += 4) {
      const auto old = ptx::load_shared<ptx::Vector<float, 4>>(address + i / 4 * wg_threads * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) O[i + e] = ptx::fma(old[e], factor[e / 2], O[i + e]);
    }
  }
};

}  // namespace flash_attention::forward_sm90_fp8
