#pragma once

// A consumer warpgroup of forward/sm90 and forward/sm90_fp8: its current tile, its place in the block and in the rings of
// stages, and its ping-pong barriers.

#include "forward/sm90/scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config, typename S, typename Storage>
struct WarpgroupBase {
  const AttentionArgs& args;
  Storage& shared;
  const int warpgroup;
  const int thread;         // in the warpgroup
  int num_tiles = 0;        // finished so far
  unsigned num_blocks = 0;  // K blocks whose scores have been computed; V follows one behind

  /// What all lanes of a warp agree on. Without uniform_by_vote (Shape) a shuffle tells the compiler so: loops over blocks
  /// count in uniform registers only then, and wgmma takes its descriptors from those.
  __device__ __forceinline__ static int uniform(int x) { return S::uniform_by_vote ? x : ptx::shuffle(x, 0); }

  /// The current tile. It is read from shared memory when it is needed, and neither it nor its address is kept in
  /// registers.
  __device__ __forceinline__ const Tile& stored_tile() const {
    return shared.tiles[ptx::registers_fresh(num_tiles) % tile_stages];
  }
  /// The same, with what loops and branches depend on known to be uniform.
  __device__ __forceinline__ Tile tile() const {
    constexpr Features features = config.features;
    Tile tile = stored_tile();
    tile.first = uniform(tile.first);
    tile.blocks = uniform(tile.blocks);
    if constexpr (!(features.packed || features.seqused_q || features.seqused_kv || features.key_lengths ||
                    features.left_padding)) {
      tile.sequence = tile::make_sequence<features>(args, tile.sequence.batch_idx);  // all but this is constant
    }
    return tile;
  }
  /// The blocks of it that this warpgroup visits.
  __device__ __forceinline__ Blocks blocks() const {
    const Blocks& seen = stored_tile().seen[S::row_group(warpgroup)];
    return {.begin = uniform(seen.begin),
            .interior_begin = uniform(seen.interior_begin),
            .interior_end = uniform(seen.interior_end),
            .end = uniform(seen.end)};
  }
  __device__ __forceinline__ Work work() const { return static_cast<Work>(uniform(static_cast<int>(stored_tile().work))); }
  __device__ __forceinline__ Attempt attempt() const {
    return static_cast<Attempt>(uniform(static_cast<int>(stored_tile().attempt)));
  }
  __device__ __forceinline__ bool visited_interior() const {
    const Blocks& seen = stored_tile().seen[S::row_group(warpgroup)];
    return seen.interior_begin < seen.interior_end;
  }
  __device__ __forceinline__ PipelineState<S::q_stages> q_state() const { return PipelineState<S::q_stages>(num_tiles); }

  __device__ __forceinline__ ScoreMath<config> scores_of(const Tile& tile) const {
    const int t = ptx::registers_fresh(thread);
    return {args, tile, tile.q_begin + S::row_group(warpgroup) * wg_rows + t / 32 * 16, t % 32};
  }

  /// All threads of the warpgroup meet.
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads); }

  /// The products that read a stage are complete: the producer warp may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& free) const {
    if (thread == 0) ptx::mbarrier_arrive(free);
  }
  /// Q has been read.
  __device__ __forceinline__ void release_queries() const {
    release(shared.Q_empty[q_state().stage][S::row_group(warpgroup)]);
  }

  // -- ping-pong --------------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products. One alone has no barrier.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (S::pingpong) ptx::barrier_sync(barrier_pingpong + warpgroup, 2 * wg_threads);
  }
  /// The ping-pong barrier makes the whole warpgroup meet; without ping-pong, this one does.
  __device__ __forceinline__ void sync_without_pingpong() const {
    if constexpr (!S::pingpong) sync();
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
};

}  // namespace flash_attention::forward_sm90
