#pragma once

// What a warpgroup of forward/sm90_fp8 that attends is made of: its place in the block, its ping-pong, its products, its sums.

#include "forward/sm90_fp8/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::forward_sm90_fp8 {

/// A descriptor in two words: moving its start changes the low one, without a carry. It comes by a shuffle, so that the
/// compiler knows it for the same in all lanes and works with it in uniform registers.
struct Descriptor {
  unsigned low;
  unsigned high;

  __device__ __forceinline__ Descriptor(const void* tile, int swizzle_bytes) {
    const unsigned long long whole = ptx::wgmma_descriptor(tile, 0, 8 * swizzle_bytes, swizzle_bytes);
    low = ptx::shuffle(static_cast<unsigned>(whole), 0);
    high = static_cast<unsigned>(whole >> 32);
  }
  /// So many bytes later.
  __device__ __forceinline__ unsigned long long at(int bytes) const {
    return static_cast<unsigned long long>(high) << 32 | (low + bytes / 16);
  }
};

template <ForwardConfig config>
struct Warpgroup {
  using S = Shape<config>;
  using Math = ScoreMath<config>;
  using ScoreTile = typename Math::Tile;
  using PackedTile = typename Softmax<config>::PackedTile;
  using OutputTile = float[S::width_v / 2];

  const AttentionArgs& args;
  SharedStorage<config>& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  int num_tiles = 0;        // finished so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  __device__ __forceinline__ static int uniform(int x) { return ptx::shuffle(x, 0); }

  /// The current tile, read from shared memory when it is needed.
  __device__ __forceinline__ const Tile& stored_tile() const {
    return shared.tiles[ptx::registers_fresh(num_tiles) % tile_stages];
  }
  /// The same, with what loops and branches depend on known to be uniform.
  __device__ __forceinline__ Tile tile() const {
    constexpr Features features = config.features;
    Tile tile = stored_tile();
    tile.first = uniform(tile.first);
    tile.blocks = uniform(tile.blocks);
    if constexpr (!(features.packed || features.seqused_q || features.seqused_kv || features.key_lengths)) {
      tile.sequence = tile::make_sequence<features>(args, tile.sequence.batch_idx);  // all but this is constant
    }
    return tile;
  }
  __device__ __forceinline__ Blocks blocks() const {
    const Blocks& seen = stored_tile().seen[warpgroup];
    return {.begin = uniform(seen.begin),
            .interior_begin = uniform(seen.interior_begin),
            .interior_end = uniform(seen.interior_end),
            .end = uniform(seen.end)};
  }
  __device__ __forceinline__ Work work() const { return static_cast<Work>(uniform(static_cast<int>(stored_tile().work))); }
  __device__ __forceinline__ bool visited_interior() const {
    const Blocks& seen = stored_tile().seen[warpgroup];
    return seen.interior_begin < seen.interior_end;
  }
  __device__ __forceinline__ PipelineState<S::q_stages> q_state() const { return PipelineState<S::q_stages>(num_tiles); }

  __device__ __forceinline__ Math scores_of(const Tile& tile) const {
    const int t = ptx::registers_fresh(thread);
    return {args, tile, tile.q_begin + warpgroup * wg_rows + t / 32 * 16, t % 32};
  }

  // -- ping-pong --------------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (S::pingpong) ptx::barrier_sync(barrier_pingpong + warpgroup, 2 * wg_threads);
  }
  __device__ __forceinline__ void pingpong_signal() const {
    const int next = warpgroup + 1 == S::warpgroups ? 0 : warpgroup + 1;
    if constexpr (S::pingpong) ptx::barrier_arrive(barrier_pingpong + next, 2 * wg_threads);
  }
  /// Warpgroup 0 issues first. After the last tile it waits once more, so that no arrival is left over.
  __device__ __forceinline__ void pingpong_begin() const {
    if (warpgroup == S::warpgroups - 1) pingpong_signal();
  }
  __device__ __forceinline__ void pingpong_end() const {
    if (warpgroup == 0) pingpong_wait();
  }
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads); }

  // -- products ---------------------------------------------------------------------------------------------------------

  /// Issues scores = Q K^T.
  __device__ __forceinline__ void issue_scores(ScoreTile& scores, int k_stage) const {
    const Descriptor Q(shared.Q[q_state().stage][warpgroup], chunk_dim), K(shared.K[k_stage], chunk_dim);
    ptx::wgmma_fence();  // softmax is done with these registers
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
    const Descriptor V(shared.V[v_stage], S::v_chunk);
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < S::steps_pv; ++step) {
      const int chunk = step * 32 / S::v_chunk, inside = step * 32 % S::v_chunk;
      ptx::wgmma_fp8_rs<S::code, S::width_v>(O, P[step], V.at(chunk * S::width_v * S::v_chunk + inside),
                                             accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// The products that read a stage are complete: the loading warp may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }
  __device__ __forceinline__ void release_queries() const { release(shared.Q_empty[q_state().stage][warpgroup]); }

  // -- sums in fp32 -----------------------------------------------------------------------------------------------------

  /// This thread's sums, four at a time: neighbours of a warp lie side by side.
  __device__ __forceinline__ unsigned sums_address() const {
    return ptx::shared_address(shared.O[warpgroup]) + static_cast<unsigned>(ptx::registers_fresh(thread)) * 16;
  }

  /// The store of the tile before has read the memory that the sums take.
  __device__ __forceinline__ void take_sums() const {
    if (thread == 0) ptx::bulk_wait_read<0>();
    sync();
  }
  /// The sums become O, or O and what they were times `factor`.
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
